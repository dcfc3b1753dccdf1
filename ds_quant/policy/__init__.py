"""Which codec is used where, what a step then costs, and which scheme to choose."""
