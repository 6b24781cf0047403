"""What leaves clients and the server: the account, noise on means, secure sums, and who can have them."""
