"""What nobody needs to train with SHEAR or GRPO; it imports the core, and the core none of it."""
