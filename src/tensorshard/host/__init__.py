"""What this process takes of its machine: cores, memory, the allocator, the scheduler, compiled C."""
