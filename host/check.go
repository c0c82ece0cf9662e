package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/devices"
	"github.com/kvhost/kvhost/host/internal/doctor"
	"github.com/kvhost/kvhost/host/internal/observe"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/server/socket"
	"github.com/kvhost/kvhost/host/internal/store"
)

// Checked is what [Check] found.
type Checked struct {
	Refused  error            // the first reason for which a host does not start
	Findings []doctor.Finding // all of them, roots without which a host would start, and what a start would warn of

	mu sync.Mutex // of Findings, while parts may log
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

// Check goes through the parts of [New] and [Host.Run] in their order, and finds all that they would refuse at present, by the
// same functions. It serves nothing, uses no GPU, and leaves no trace but compiled policies in their cache. A host that runs with
// these roots, this socket or this address is not disturbed, and is a reason to refuse.
func Check(ctx context.Context, cfg Config) *Checked {
	c := &Checked{}
	h := &Host{cfg: cfg.Config.WithMemory(cfg.Memory), version: cfg.Version, log: slog.New(warnings{into: c}), speeds: cfg.Speeds}
	bound := &policyset.Bound{Roots: make([]*policy.Handle, len(h.cfg.Roots))} // built-in policies
	var err error
	if h.policies, err = policyset.Open(ctx, h.cfg, h.log); err != nil {
		c.refuse("policies", err)
		h.policies = nil
	} else {
		bound = h.policies.Bound()
	}
	if h.devices, err = devices.Open(h.cfg, h.log); err != nil {
		c.refuse("memory", err)
		h.devices = nil
	} else {
		out, err := store.Try(ctx, h.storeConfig(h.cfg, bound))
		c.refuse("roots", err)
		for _, path := range slices.Sorted(maps.Keys(out)) {
			if err == nil {
				c.find(doctor.Problem, "root "+path, "a host would start without it: "+out[path].Error())
			}
		}
	}
	c.tryPeers(ctx, h)
	if h.engine, err = h.newEngine(); err != nil {
		c.refuse("memory", err)
		h.engine = nil
	}
	for _, x := range certificates(h.cfg) {
		if level, says := x.judge(time.Now()); says != "" {
			c.find(level, x.setting, says)
		}
	}
	_, err = spansConfig(ctx, h.cfg, h.log)
	c.refuse("traces", err)
	_, _, err = accessOf(h.cfg)
	c.refuse("access", err)
	_, _, err = memoryBudgets(h.cfg)
	c.refuse("memory", err)
	c.refuse("HTTP", h.tryHTTP(h.log))
	c.refuse("socket", socket.Free(h.cfg.Socket, h.log))
	c.refuse("end of the check", h.Close())
	return c
}

// answerWithin is how long a peer may take to answer a check.
const answerWithin = 3 * time.Second

// tryPeers listens where the host would lend, and asks each peer for a word. One that does not answer keeps no host from starting.
func (c *Checked) tryPeers(ctx context.Context, h *Host) {
	listens, asks := *h.cfg, *h.cfg
	listens.Peers.NIXL, asks.Peers.Listen = "", ""
	p, err := openPeers(&listens, h.log)
	c.refuse("peers", errors.Join(err, p.Close(), p.CloseFiles()))
	if err != nil {
		return
	}
	if p, err = openPeers(&asks, h.log); p == nil {
		c.refuse("peers", err)
		return
	}
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
	c.refuse("peers", errors.Join(p.Close(), p.CloseFiles()))
}

func (h *Host) tryHTTP(log *slog.Logger) error {
	if h.cfg.HTTP.Listen == "" {
		return nil
	}
	w := httpConfig(h.cfg)
	w.Log = log
	return observe.Try(w)
}

// addressesFree fails where the host could not listen. A root that exists is tried first, because "in use by process N" says
// most; one that would be made is not, so that a second host which does not start leaves none.
func (h *Host) addressesFree() error {
	log := slog.New(slog.DiscardHandler) // what there is to warn of is said when the addresses are taken
	if err := h.tryHTTP(log); err != nil {
		return err
	}
	return socket.Free(h.cfg.Socket, log)
}

// httpConfig is a configuration in the form of the HTTP interface.
func httpConfig(c *config.Config) observe.Config {
	w := c.HTTP
	return observe.Config{Listen: w.Listen, CertFile: w.TLSCert, KeyFile: w.TLSKey, TokenFile: w.TokenFile, Profiles: w.Profiles}
}

// warnings is a log that makes findings of warnings. What is an error is a reason to refuse, or a root that is out.
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
