package command

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/kvhost/kvhost/host"
)

// reloadOnHangup changes the host to its configuration at each SIGHUP, until the returned function is called.
func reloadOnHangup(ctx context.Context, h *host.Host, s *settings, log *slog.Logger, level *slog.LevelVar) func() {
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-ctx.Done():
				return
			case <-signals:
			}
			loaded, err := s.load()
			var changed []string
			if err == nil {
				changed, err = h.Reload(ctx, &loaded.Config)
			}
			if err != nil {
				log.Error("configuration not reloaded: nothing changed", "error", err)
				continue
			}
			level.Set(levels[loaded.Config.Log.Level])
			log.Info("configuration reloaded", "changed", changed)
		}
	}()
	return func() {
		signal.Stop(signals)
		cancel()
		<-over
	}
}
