package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host"
	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/staging"
)

func newServe() *cobra.Command {
	var s settings
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve clients until SIGINT or SIGTERM (the default)",
		Long: `Serves clients until SIGINT or SIGTERM, which end it cleanly. SIGHUP is kvhost reload
without an answer.`,
		Example: `  kvhost --policy lru.wasm
  kvhost --config /etc/kvhost.toml --log-level debug
  kvhost --root /mnt/nvme0/kv=2TiB --root /mnt/nvme1/kv=2TiB --policy my-evict.wasm --policy fanout.wasm`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return serve(cmd.Context(), &s) },
	}
	s.addTo(cmd)
	return cmd
}

func serve(ctx context.Context, s *settings) error {
	loaded, err := s.load()
	if err != nil {
		return err
	}
	ctx, stop := untilSignal(ctx)
	defer stop()
	// A second signal kills the process, but not within a second of the first, because some tools and terminals send
	// two at once.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	log, level := newLog(&loaded.Config.Log)
	for _, w := range loaded.Warnings {
		log.Warn(w)
	}
	logStart(log, s.file, &loaded.Config)
	memory := memoryBefore(&loaded.Config)
	if memory > 0 {
		log.Info("memory before the roots", "bytes", memory, "setting", "store.memory")
	}
	h, err := host.New(ctx, host.Config{Config: &loaded.Config, Log: log, Level: level, Version: version, Memory: memory, Load: s.config})
	if err != nil && ctx.Err() != nil {
		log.Info("stopped while starting", "error", err)
		return nil
	}
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	defer reloadOnHangup(ctx, h)()
	select {
	case <-h.Ready():
		if err := notify("READY=1"); err != nil {
			log.Warn("the service manager does not know that the host serves", "error", err)
		}
		err = untilReady(log, h, ended)
	case err = <-ended:
	}
	if err != nil {
		return fmt.Errorf("host: %w", err)
	}
	log.Info("stopped")
	return nil
}

// untilReady waits until the host is ready, as /readyz reports it, and logs that. If it takes long, it logs the reasons first. It
// returns when the host has ended, with the error of the end.
func untilReady(log *slog.Logger, h *host.Host, ended <-chan error) error {
	address := []any{"socket", h.Socket(), "http", h.HTTPAddr(), "version", version}
	for wait, said := time.Millisecond, false; ; wait = min(2*wait, time.Second) {
		why := h.Status().NotReady
		if len(why) == 0 {
			log.Info("ready", address...)
			return <-ended
		}
		if !said && wait > 100*time.Millisecond { // most scans end within this time
			log.Info("not ready yet", append(address, "why", why)...)
			said = true
		}
		select {
		case <-time.After(wait):
		case err := <-ended:
			return err
		}
	}
}

// notify sends a state to the service manager as sd_notify(3) does, if there is a manager that expects it.
func notify(state string) error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	c, err := net.Dial("unixgram", socket)
	if err != nil {
		return err
	}
	_, err = c.Write([]byte(state))
	return errors.Join(err, c.Close())
}

// memoryBefore returns the size of the root in memory in front of the configured ones, on this machine.
func memoryBefore(c *config.Config) int64 {
	_, available, _ := staging.MachineMemory()
	return c.MemoryBefore(available)
}

// logStart logs the version, the configuration and the roots, which an operator looks for first.
func logStart(log *slog.Logger, file string, c *config.Config) {
	log.Info("starting", "version", version, "pid", os.Getpid(), "config",
		cmp.Or(file, os.Getenv(config.EnvFile), "none"),
		"durability", c.Store.Durability)
	for _, r := range c.Roots {
		path, err := filepath.Abs(r.Path)
		if err != nil || !r.Kind().HasDirectory() {
			path = r.Path
		}
		log.Info("root", "path", path, "capacity", config.FormatSize(r.Capacity), "shared", r.Shared)
	}
}
