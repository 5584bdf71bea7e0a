"""What a Plan keeps in host memory or on disk: tiers, transfers between them, and updates on the host."""
