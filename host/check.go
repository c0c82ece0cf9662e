package host

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store/health"
)

// Checked is the result of [Check].
type Checked struct {
	Refused  error            // first reason for which a host would not start
	Findings []doctor.Finding // all findings, including roots without which a host would start, and warnings of a start

	mu sync.Mutex // guards Findings while parts may log
}

func (c *Checked) find(level doctor.Level, about, says string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Findings = append(c.Findings, doctor.Finding{Level: level, About: about, Says: says})
}

func (c *Checked) refuse(about string, err error) {
	if err == nil {
		return
	}
	if c.Refused == nil {
		c.Refused = err
	}
	c.find(doctor.Problem, about, err.Error())
}

// Check opens the parts of a host as [New] does, except those that use GPUs or serve, and closes them. It continues after a refused part,
// so that it finds everything that [New] and [Host.Run] would refuse at present. It leaves no trace except compiled policies in their
// cache. A host that runs with these roots, this socket or this address is not disturbed, and counts as a reason to refuse.
func Check(ctx context.Context, cfg Config) *Checked {
	c := &Checked{}
	cfg.Log = slog.New(warnings{into: c})
	h := unopened(cfg)
	h.found = c
	for _, p := range h.parts() {
		if !p.works {
			c.refuse(p.about, p.open(ctx))
		}
	}
	if h.store != nil {
		for _, r := range h.store.Stats().Roots {
			if r.State == health.Out {
				c.find(doctor.Problem, "root "+r.Path, "a host would start without it: "+r.Reason)
			}
		}
	}
	if h.peers != nil {
		c.askPeers(ctx, h)
	}
	c.refuse("socket", socket.Free(h.cfg.Socket, h.log))
	c.refuse("end of the check", h.Close())
	return c
}

// answerWithin is how long a peer may take to answer a check.
const answerWithin = 3 * time.Second

// askPeers contacts each peer. A peer that does not answer does not keep a host from starting.
func (c *Checked) askPeers(ctx context.Context, h *Host) {
	p := h.peers
	if says, err := p.NIXL(); err != nil {
		c.find(doctor.Warning, "peers.nixl", err.Error())
	} else if says != "" {
		c.find(doctor.Note, "peers.nixl", says)
	}
	for _, name := range h.cfg.Peers.List() {
		ctx, stop := context.WithTimeout(ctx, answerWithin)
		list, err := p.Try(ctx, name)
		if err != nil {
			c.find(doctor.Warning, "peer "+name, "it does not lend: "+err.Error())
		} else {
			c.find(doctor.Note, "peer "+name, "it lends")
		}
		for _, t := range list {
			switch {
			case t.NIXL != nil:
				c.find(doctor.Warning, "peer "+name, fmt.Sprintf("%s is read by gRPC, not by NIXL: %v", t.Address, t.NIXL))
			case t.Speed > 0:
				c.find(doctor.Note, "peer "+name, fmt.Sprintf("%s is read by NIXL, at up to %.1f GB/s", t.Address, t.Speed/1e9))
			}
		}
		stop()
	}
}

// addressesFree returns an error if the host could not listen on one of its addresses. An existing root is tried before this,
// because its error "in use by process N" says most. A missing root is tried after this, so that a second host that does not
// start leaves no directory behind.
func (h *Host) addressesFree() error {
	log := slog.New(slog.DiscardHandler) // warnings are logged when the addresses are taken
	if h.cfg.HTTP.Listen != "" {
		w, err := observe.Listen(httpConfig(h.cfg, log))
		if err == nil {
			err = w.Close()
		}
		if err != nil {
			return err
		}
	}
	return socket.Free(h.cfg.Socket, log)
}

// httpConfig returns the configuration of the HTTP interface.
func httpConfig(c *config.Config, log *slog.Logger) observe.Config {
	w := c.HTTP
	return observe.Config{Log: log, Listen: w.Listen, CertFile: w.TLSCert, KeyFile: w.TLSKey, TokenFile: w.TokenFile, Profiles: w.Profiles}
}

// warnings is a log handler that turns warnings into findings. Errors are ignored, because each is also a reason to refuse or a
// root that is out of service.
type warnings struct{ into *Checked }

func (w warnings) Enabled(_ context.Context, level slog.Level) bool { return level == slog.LevelWarn }
func (w warnings) WithAttrs([]slog.Attr) slog.Handler               { return w }
func (w warnings) WithGroup(string) slog.Handler                    { return w }

func (w warnings) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += fmt.Sprintf("; %s: %v", a.Key, a.Value)
		return true
	})
	w.into.find(doctor.Warning, "start", text)
	return nil
}
