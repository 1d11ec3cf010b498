"""The machine: launching, machine code, graphs and streams, and what a processor can do."""
