package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvhost/kvhost/gds"
)

// Clients are several clients of one host, each with its own pages.
type Clients struct {
	GPUs []*gds.GPU // the GPU with the memory; nil: host memory
	// Ranks makes them the ranks of one engine: each chunk is an entry with a piece of every client. Otherwise each is an
	// engine with chunks of its own.
	Ranks bool
}

// together is a measurement of several clients under way.
type together struct {
	clients []*bench
	alone   [layerLoads][][]float64 // by client and round
	all     [layerLoads][]float64   // by round
}

// RunTogether measures stores and loads of each client alone and of all at the same time, in the same rounds.
func RunTogether(ctx context.Context, c Config, k Clients) (_ []Row, err error) {
	if c.Chunks < 1 || c.Rounds < 1 || c.Copiers < 1 || len(k.GPUs) < 2 || len(c.Compression) > 1 {
		return nil, fmt.Errorf("%w: %d clients, %d chunks, %d rounds, compression %v", ErrConfig, len(k.GPUs), c.Chunks, c.Rounds,
			c.Compression)
	}
	var t together
	running := &hosts{host: c.Host, root: c.Root}
	defer func() {
		for _, b := range t.clients {
			err = errors.Join(err, b.end())
		}
	}()
	for i, gpu := range k.GPUs {
		b := &bench{Config: c, hosts: running, client: i}
		b.GPU = gpu
		if k.Ranks {
			b.ranks = len(k.GPUs)
		}
		t.clients = append(t.clients, b)
		if err := b.begin(ctx); err != nil {
			return nil, err
		}
	}
	for i := range t.alone {
		t.alone[i] = make([][]float64, len(t.clients))
	}
	for half := range 2 * (c.Rounds + 1) {
		round, alone := half/2, (half/2+half)%2 == 0 // in turns
		if err := t.half(ctx, half, alone, round > 0); err != nil {
			return nil, err
		}
	}
	route, err := t.clients[0].sessions[0].host.routeTaken(ctx)
	if err != nil {
		return nil, err
	}
	return t.rows(route), nil
}

// half makes the passes of a round, by each client alone or by all at the same time.
func (t *together) half(ctx context.Context, half int, alone, counts bool) error {
	for i, b := range t.clients {
		if i > 0 && b.ranks > 0 {
			b.stored = nil // the first has removed the entries
		}
		if err := b.forget(ctx); err != nil {
			return err
		}
		b.stored = b.chunks(half)
	}
	for pass := range layerLoads {
		if !alone {
			rate, err := t.time(ctx, pass, t.clients)
			if err != nil {
				return err
			}
			if counts {
				t.all[pass] = append(t.all[pass], rate)
			}
			continue
		}
		for i := range t.clients {
			rate, err := t.time(ctx, pass, t.clients[i:i+1])
			if err != nil {
				return err
			}
			if counts {
				t.alone[pass][i] = append(t.alone[pass][i], rate)
			}
		}
	}
	return nil
}

// time makes a pass of clients at the same time, and returns the bytes of all over the time of all.
func (t *together) time(ctx context.Context, number int, clients []*bench) (rate float64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	passes, bytes := make([]pass, len(clients)), 0.0
	for i, b := range clients {
		if number == stores {
			passes[i] = b.storePass(ctx, b.sessions[0], &figures{}, 0)
		} else {
			passes[i] = b.loadPass(ctx, b.sessions[0], false, &figures{}, 0)
		}
		if err := passes[i].ready(); err != nil {
			return 0, err
		}
		bytes += float64(b.pageBytes())
	}
	var work errgroup.Group
	start := time.Now()
	for _, p := range passes {
		work.Go(func() error {
			_, err := p.run()
			return err
		})
	}
	err = work.Wait()
	took := time.Since(start)
	for _, p := range passes {
		if err == nil && p.check != nil {
			err = p.check()
		}
	}
	return bytes / 1e9 / took.Seconds(), err
}

func (t *together) rows(route string) (rows []Row) {
	for i, name := range passNames[:layerLoads] {
		r := Row{Pass: name, Route: route, Ours: spread(t.all[i]).Mid}
		times := make([]float64, len(t.all[i]))
		for round, all := range t.all[i] {
			sum := 0.0
			for _, list := range t.alone[i] {
				sum += list[round]
			}
			times[round] = all / sum * float64(len(t.clients))
		}
		r.Ratio = spread(times)
		for _, list := range t.alone[i] {
			r.Alone = append(r.Alone, spread(list).Mid)
		}
		rows = append(rows, r)
	}
	return rows
}

// writeTogether prints the rows of several clients as a table in Markdown.
func writeTogether(w io.Writer, rows []Row) error {
	if _, err := fmt.Fprint(w, "| pages | memory | files in | route | pass | each alone | together | together / alone |\n",
		"|---|---|---|---|---|---|---|---|\n"); err != nil {
		return err
	}
	for _, r := range rows {
		var alone []string
		for _, rate := range r.Alone {
			alone = append(alone, fmt.Sprintf("%.1f", rate))
		}
		if _, err := fmt.Fprintf(w, "| %s | %s | %s | %s | %s | %s | %.1f | %s |\n", r.Pages, r.Memory, r.Files, r.Route,
			r.Pass, strings.Join(alone, ", "), r.Ours, r.Ratio); err != nil {
			return err
		}
	}
	return nil
}
