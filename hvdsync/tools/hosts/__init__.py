"""Two hosts on one machine, for measurements and tests: a folder in, hosts with ssh out.

Each is a set of namespaces of Linux with a name, an address, processes and a home of its own.
"""

from hvdsync.tools.hosts.hosts import Host, missing, two_hosts

__all__ = ["Host", "missing", "two_hosts"]
