"""From a configuration to a trained agent."""
