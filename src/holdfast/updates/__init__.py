"""What happens to a client's update before it is part of the global model: clipping, noise and the account of both."""
