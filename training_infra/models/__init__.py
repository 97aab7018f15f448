"""Models as objects: Llama, and what makes a mixture of experts of one."""
