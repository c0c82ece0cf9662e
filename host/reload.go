package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policyset"
)

// Messages about the results of reloads. The log limit does not apply to them.
const (
	logReloaded = "configuration reloaded"
	logRefused  = "configuration not reloaded: nothing changed"
)

// Reread reads the configuration again ([Config.Load]) and changes the host to it, as [Host.Reload] does. The result is logged and counted
// in the metrics.
func (h *Host) Reread(ctx context.Context) (changed []string, err error) {
	next, err := h.made.Load()
	if err == nil {
		changed, err = h.Reload(ctx, next)
	}
	h.reloads.Observe(err == nil, time.Now())
	if err != nil {
		h.log.Error(logRefused, "error", err)
		return nil, err
	}
	if h.made.Level != nil {
		_ = h.made.Level.UnmarshalText([]byte(next.Log.Level)) // cannot fail: the level is one of the choices
	}
	h.log.Info(logReloaded, "changed", changed)
	return changed, nil
}

// ErrRestart means that a running host cannot make a change.
var ErrRestart = errors.New("restart needed")

// Reload changes a running host to another configuration. It makes all changes or none, and returns the keys that
// changed. One reload is made at a time. Reload waits for scans.
func (h *Host) Reload(ctx context.Context, next *config.Config) (changed []string, err error) {
	h.reloading.Lock()
	defer h.reloading.Unlock()
	next = OnMachine(next, h.machine).WithMemory(h.made.Memory)
	var refused []string
	for _, c := range config.Changes(h.live.Load(), next) {
		changed = append(changed, c.Key)
		if c.Restart != "" {
			refused = append(refused, c.Key+" "+c.Restart)
		}
	}
	if refused != nil {
		return nil, fmt.Errorf("%w: %s", ErrRestart, strings.Join(refused, "; "))
	}
	rules, users, err := accessOf(next)
	if err != nil {
		return nil, err
	}
	modules, err := h.policies.Reload(ctx, next, func(b *policyset.Bound) error {
		taken, err := h.store.Reload(ctx, h.storeConfig(next, b))
		for _, t := range taken {
			if t.Root == "" { // for an evict policy, the root identifies it
				h.log.Info("policy replaced", "role", t.Role.String(), "was", t.From)
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, label := range modules {
		changed = append(changed, "the module of policy "+label)
	}
	h.live.Store(next)
	if err := h.server.Reload(rules, users, next.Capacity()); err != nil { // the socket's file system took it away, so that no client can connect anyway
		h.log.Error("sockets keep their mode", "error", err)
	}
	return changed, nil
}
