"""k3-nano: training, export and evaluation of the bundled model (Kimi K3's architecture, small)."""
