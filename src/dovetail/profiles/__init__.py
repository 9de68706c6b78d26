"""What hardware and models cost: measured files, roofline presets, and what is learnt from iterations that ran."""
