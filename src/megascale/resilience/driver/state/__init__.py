"""The state of the job, the tables of its transitions, the journal that stores it, and the audit log."""
