"""The subcommands that look at a store from outside a job."""
