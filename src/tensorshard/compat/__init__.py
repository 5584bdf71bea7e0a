"""The interfaces of other libraries on top of ours: TorchShard (with `nn`, `distributed` and `utils`) and Paddle."""
