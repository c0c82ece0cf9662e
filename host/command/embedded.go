package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policyset"
)

// embed starts a host in this process behind a real socket in a temporary directory. It returns the socket and a
// function that stops the host. The host has the policies, engine and limits of the configuration, but its own socket
// and no HTTP. It has one root of its own unless the flags ask for the configuration's roots.
func (r *replayFlags) embed(ctx context.Context, base *config.Config) (socket string, stop func() error, err error) {
	log, _ := newLog(&base.Log)
	level := func(s config.Setting) bool { return s.Key == "log.level" }
	if !slices.ContainsFunc(r.given, level) { // the user waits for the table, not for the log
		quiet := base.Log
		quiet.Level = config.LevelWarn
		log, _ = newLog(&quiet)
	}
	dir, err := config.SocketDir("kvhost-replay-")
	if err != nil {
		return "", nil, err
	}
	made := []string{dir}
	remove := func() (err error) {
		for _, d := range made {
			err = errors.Join(err, os.RemoveAll(d))
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, remove())
		}
	}()
	c := base.Clone()
	c.Socket, c.HTTP.Listen = filepath.Join(dir, "s"), ""
	root := config.Root{Path: r.store, Capacity: config.Default().Roots[0].Capacity, ForPieces: true}
	if root.Path == "" {
		if root.Path, err = os.MkdirTemp("", "kvhost-replay-chunks-"); err != nil {
			return "", nil, err
		}
		made = append(made, root.Path)
	}
	if r.capacity != "" {
		root.Capacity, err = r.capacityBytes(func() (int64, error) { return r.entryBytes(ctx, c, log) })
		if err != nil {
			return "", nil, err
		}
	}
	if !r.withRoots {
		c.Roots = []config.Root{root}
	}
	if err := c.Validate(); err != nil {
		return "", nil, fmt.Errorf("%w: %w", config.ErrValue, err)
	}
	h, err := host.New(ctx, host.Config{Config: c, Log: log, Version: version})
	if err != nil {
		return "", nil, err
	}
	// The host must outlive the sessions, even after an interrupt.
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- h.Run(run) }()
	select {
	case <-h.Ready():
		<-h.Routed() // the routes must be chosen before the measurement
	case err := <-ended:
		cancel()
		return "", nil, fmt.Errorf("embedded host: %w", err)
	}
	return c.Socket, func() error {
		cancel()
		return errors.Join(<-ended, remove())
	}, nil
}

// entryBytes returns the size of a chunk on disk under the host's layout policy.
func (r *replayFlags) entryBytes(ctx context.Context, c *config.Config, log *slog.Logger) (int64, error) {
	cache, err := policyset.OpenCache(c.PolicyCache, log)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", policyset.ErrPolicy, err)
	}
	role := abi.RoleLayout
	for i := range c.Policies {
		p := &c.Policies[i]
		if len(p.Roles) > 0 && !slices.Contains(p.Roles, role.String()) {
			continue
		}
		opt := policyset.Options(c, p, cache, log)
		m, err := policy.Open(ctx, p.Module, opt)
		if err != nil {
			return 0, fmt.Errorf("%w: %s: %w", policyset.ErrPolicy, p.Module, err)
		}
		defer m.Close(ctx)
		if m.Has(role) {
			return r.options.Shape.EntryBytes(ctx, m, policy.Config(p.Config))
		}
	}
	return r.options.Shape.EntryBytes(ctx, nil, nil)
}
