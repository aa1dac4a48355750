"""Where stages run: locks of the controller."""
