"""What lets Keras save a subclass as the class that it stands for: the class in, a property out."""

from __future__ import annotations

import sys
from typing import Any


def saved_as(base: type) -> Any:
    """A ``__class__`` for a subclass of ``base``, which Keras takes for ``base`` itself.

    Keras writes ``obj.__class__`` into a file, which then loads without the subclass. Nobody else
    may be told so: ``torch.compile`` would look methods up in ``base`` and leave out what the
    subclass does. In the subclass ``super()`` without arguments would look this attribute up, too.
    """

    def tell(self: Any) -> type:
        asking: str = sys._getframe(1).f_globals.get("__name__", "")
        return base if asking.startswith("keras.") else type(self)

    return property(tell)
