"""Makes drafts for a target: distillation. Everything here runs on one device."""
