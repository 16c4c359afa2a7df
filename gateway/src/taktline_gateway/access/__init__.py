"""Who may ask what: API keys, access tokens, rights by tenant and policy, rates, and the audit log."""
