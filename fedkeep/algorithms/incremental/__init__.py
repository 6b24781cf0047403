"""Class-incremental methods: new classes arrive in tasks, and clients of one network must not forget the old ones."""
