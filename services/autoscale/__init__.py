"""The autoscaler: capacity of each stage follows its queue (docs/scaling.md)."""
