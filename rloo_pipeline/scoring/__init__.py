"""How reward functions are called: worker processes, what they say to each other, who calls what when."""
