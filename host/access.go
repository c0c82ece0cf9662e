package host

import (
	"fmt"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/server/socket"
)

// accessOf returns the rules of tenants, and the users that may connect.
func accessOf(c *config.Config) (rules socket.Rules, users socket.Users, err error) {
	for _, t := range c.Tenants {
		rules = append(rules, socket.Tenants{First: t.First, Last: t.Last, UIDs: t.UIDs, Private: t.Private, Sessions: t.Sessions})
	}
	if users.UIDs, err = config.IDs(c.SocketUsers); err != nil {
		return nil, users, fmt.Errorf("socket_users: %w", err)
	}
	if users.GIDs, err = config.IDs(c.SocketGroups); err != nil {
		return nil, users, fmt.Errorf("socket_groups: %w", err)
	}
	users.UIDs = append(users.UIDs, rules.Users()...)
	return rules, users, nil
}
