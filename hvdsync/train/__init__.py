"""``python -m hvdsync.train``: options in; a trained model, its checkpoints and a table out.

The loop knows no framework; one worker module each drives PyTorch, TensorFlow and Keras.
"""
