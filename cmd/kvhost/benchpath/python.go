package benchpath

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/kvhost/kvhost/host/chunk"
	"github.com/kvhost/kvhost/host/transfer/pathbench"
)

//go:embed client.py
var clientScript string

// pythonPath stores and loads through the Python client in a process of its own, which takes orders and tells times.
type pythonPath struct {
	host    *hostProcess
	process *exec.Cmd
	orders  io.WriteCloser
	answers *bufio.Reader
}

// order is what the Python process is to do. Its names are those of the process' functions and their parameters.
type order struct {
	Do string `json:"do"`

	Prompts [][]orderedChunk `json:"prompts,omitempty"` // of store and load
	ByLayer *bool            `json:"by_layer,omitempty"`
	Keys    []string         `json:"keys,omitempty"` // of forget
	*opening
}

type orderedChunk struct {
	Key    string   `json:"key"`
	Parent string   `json:"parent"`
	Depth  uint32   `json:"depth"`
	Blocks []uint32 `json:"blocks"`
}

type opening struct {
	Socket         string        `json:"socket"`
	Device         string        `json:"device"`
	DType          string        `json:"dtype"`
	Handles        []string      `json:"handles"`
	Planes         []chunk.Plane `json:"planes"`
	Offsets        []int64       `json:"offsets"`
	Blocks         uint32        `json:"blocks"`
	BlocksPerChunk uint32        `json:"blocks_per_chunk"`
}

type answer struct{ Seconds, First float64 }

func newPythonPath(ctx context.Context, h *hostProcess, python string, shared *pathbench.Shared) (_ *pythonPath,
	err error) {
	p := &pythonPath{host: h, process: exec.CommandContext(ctx, python, "-c", clientScript)}
	p.process.Stderr, p.process.WaitDelay = os.Stderr, 10*time.Second
	if shared.File != nil {
		p.process.ExtraFiles = []*os.File{shared.File}
	}
	if p.orders, err = p.process.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.answers = bufio.NewReader(out)
	if err := p.process.Start(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPython, err)
	}
	g := &shared.Namespace.Groups[0].Geometry
	o := opening{Socket: h.socket, Device: shared.Device, DType: shared.Namespace.DType, Planes: g.Planes, Offsets: make([]int64, len(g.Planes)),
		Blocks: shared.Blocks, BlocksPerChunk: g.Blocks}
	if shared.File != nil {
		o.Offsets = shared.Offsets()
	}
	for _, handle := range shared.Handles {
		o.Handles = append(o.Handles, hex.EncodeToString(handle))
	}
	if _, err := p.ask(order{Do: "open", opening: &o}); err != nil {
		return nil, errors.Join(err, p.closeProcess())
	}
	return p, nil
}

// ask gives an order and returns the answer.
func (p *pythonPath) ask(o order) (answer, error) {
	line, err := json.Marshal(o)
	if err != nil {
		return answer{}, err
	}
	_, sent := p.orders.Write(append(line, '\n')) // a process that has ended may have said why
	line, err = p.answers.ReadBytes('\n')
	if err != nil {
		return answer{}, fmt.Errorf("%w: it has ended: %w", ErrPython, errors.Join(sent, err))
	}
	var reply struct {
		answer
		Error string
	}
	if err := json.Unmarshal(line, &reply); err != nil {
		return answer{}, fmt.Errorf("%w: it answers %q: %w", ErrPython, line, err)
	}
	if reply.Error != "" {
		return answer{}, fmt.Errorf("%w: %s", ErrPython, reply.Error)
	}
	return reply.answer, nil
}

func prompts(chunks []pathbench.Chunk) (out [][]orderedChunk) {
	for _, prompt := range pathbench.Prompts(chunks) {
		var list []orderedChunk
		for _, c := range prompt {
			ordered := orderedChunk{Key: hex.EncodeToString(c.Key[:]), Depth: c.Depth, Blocks: c.Blocks}
			if c.Parent != chunk.Root {
				ordered.Parent = hex.EncodeToString(c.Parent[:])
			}
			list = append(list, ordered)
		}
		out = append(out, list)
	}
	return out
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func (p *pythonPath) Store(_ context.Context, chunks []pathbench.Chunk) (time.Duration, error) {
	a, err := p.ask(order{Do: "store", Prompts: prompts(chunks)})
	return seconds(a.Seconds), err
}

func (p *pythonPath) Load(_ context.Context, chunks []pathbench.Chunk, byLayer bool) (first, whole time.Duration,
	err error) {
	a, err := p.ask(order{Do: "load", Prompts: prompts(chunks), ByLayer: &byLayer})
	return seconds(a.First), seconds(a.Seconds), err
}

func (p *pythonPath) Forget(_ context.Context, chunks []pathbench.Chunk) error {
	o := order{Do: "forget"}
	for _, key := range pathbench.Keys(chunks) {
		o.Keys = append(o.Keys, hex.EncodeToString(key[:]))
	}
	_, err := p.ask(o)
	return err
}

func (p *pythonPath) Processor() time.Duration {
	return p.host.processor() + processorOf(p.process.Process.Pid)
}

func (p *pythonPath) Used(ctx context.Context) (int64, error) { return p.host.used(ctx) }

func (p *pythonPath) Route(ctx context.Context) (string, error) { return p.host.routeTaken(ctx) }

func (p *pythonPath) Close() error { return errors.Join(p.closeProcess(), p.host.leave()) }

func (p *pythonPath) closeProcess() error {
	err := p.orders.Close()
	if ended := p.process.Wait(); ended != nil {
		err = errors.Join(err, fmt.Errorf("%w: %w", ErrPython, ended))
	}
	return err
}
