"""What driver and agents say to each other, and how they find each other."""
