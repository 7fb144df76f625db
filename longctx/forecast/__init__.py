"""What a run will take: memory and seconds, in closed form, traced on fake tensors, simulated, and measured."""
