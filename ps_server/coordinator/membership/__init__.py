"""Membership: admission, leases, start quorum, barriers. ``MembershipState`` owns all of it."""
