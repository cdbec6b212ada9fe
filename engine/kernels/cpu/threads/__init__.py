"""How the threads of one compiled loop get their work, wait for each other, and account for their time."""
