package gds

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
)

// values fills data with a normal distribution's values that have a scale per channel, as KV pages have them: bf16 if
// element is 2, else e4m3, truncated.
func values(data []byte, element int) {
	const channels = 128
	r := rand.New(rand.NewPCG(16, uint64(len(data))))
	var scale [channels]float64
	for c := range scale {
		scale[c] = math.Exp(r.NormFloat64() / 2)
	}
	for i := 0; i+element <= len(data); i += element {
		bits := math.Float32bits(float32(r.NormFloat64() * scale[i/element%channels]))
		if element == 2 {
			data[i], data[i+1] = byte(bits>>16), byte(bits>>24)
			continue
		}
		exponent := max(int(bits>>23&0xff)-127+7, 0)
		data[i] = byte(bits>>24&0x80 | uint32(min(exponent, 15))<<3 | bits>>20&7)
	}
}

// coded is a GPU with coders, and device memory whose pages hold data.
type coded struct {
	*GPU
	double *gdstest.Double
	pages  *Buffer
	data   []byte
	page   int
	order  []int // of the pages in the window
	mem    []byte
	image  uint64 // what is stored is there, in device memory; 0: in the coder, and brought to mem
}

func newCoded(t testing.TB, cfg Config, data []byte, page int) *coded {
	cfg.Codec = true
	c := &coded{data: data, page: page}
	c.GPU, c.double = open(t, cfg)
	if !c.FitsCoder(int64(cfg.Window), windowExtents) || c.FitsCoder(int64(cfg.Window)+1, 1) {
		t.Fatal("the coders are not of the windows' size")
	}
	c.pages = buffer(t, c.GPU, int64(len(data)))
	on(t, c.GPU, func(th *Thread) error { return th.Write(c.pages.Address, data) })
	c.mem = slot(t, c.GPU, cfg.Window, true)
	c.order = rand.New(rand.NewPCG(3, 3)).Perm(len(data) / page)
	return c
}

// add adds the pages in their order, and gives what the window then holds.
func (c *coded) add(b *Batch) (want []byte, err error) {
	want = make([]byte, len(c.data))
	for i, p := range c.order {
		copy(want[i*c.page:], c.data[p*c.page:(p+1)*c.page])
		if err := b.Add(c.pages.Address+uint64(p*c.page), i*c.page, c.page); err != nil {
			return nil, err
		}
	}
	return want, nil
}

// cut divides the window's bytes into extents.
func (c *coded) cut(w *Window, extent int) (n int) {
	for at := 0; at < len(c.data); at += extent {
		w.Extents[n] = Extent{Offset: uint64(at), Len: uint32(min(extent, len(c.data)-at))}
		n++
	}
	return n
}

// encode brings what is stored of the pages to mem.
func (c *coded) encode(th *Thread, extent, element int) (n, stored int, err error) {
	w, k := th.Window(), th.Coder()
	b := w.Begin(Gather, nil)
	if _, err := c.add(&b); err != nil {
		return 0, 0, err
	}
	n = c.cut(w, extent)
	if stored, err = k.Encode(&b, n, element, c.image); err == nil && c.image > 0 {
		err = th.Read(c.mem[:stored], c.image)
	} else if err == nil {
		err = k.Read(c.mem[:stored])
	}
	return n, stored, err
}

// begin starts to decode what is stored.
func (c *coded) begin(k *Coder, b *Batch, stored, n int) (err error) {
	from := c.image
	if from == 0 {
		from, err = k.Upload(b, c.mem[:stored])
	}
	if err != nil {
		return err
	}
	return k.Decode(b, from, n)
}

// decode brings them back to poisoned pages.
func (c *coded) decode(th *Thread, extent, stored int, flag *Flag) error {
	w, k := th.Window(), th.Coder()
	if err := th.Fill(c.pages.Address, 0xa5, c.pages.Size); err != nil {
		return err
	}
	n := c.cut(w, extent)
	b := w.Begin(Scatter, flag)
	err := c.begin(k, &b, stored, n)
	if err == nil {
		_, err = c.add(&b)
	}
	if err == nil {
		err = b.Wait()
	}
	if err != nil {
		return errors.Join(err, w.Sync())
	}
	return k.Check(n)
}

// holds reads the pages: whether they are what they were, or poison.
func (c *coded) holds(th *Thread) (right, poisoned bool, err error) {
	got := make([]byte, len(c.data))
	err = th.Read(got, c.pages.Address)
	return bytes.Equal(got, c.data), bytes.Count(got, []byte{0xa5}) == len(got), err
}

// Pages come back as they were, and take less on the way, whatever they hold and however they are cut, and wherever what is
// stored of them stands.
func TestCoderRoundTrip(t *testing.T) {
	for _, element := range []int{1, 2} {
		for _, shape := range []struct{ page, pages, extent int }{
			{16384, 40, 65536}, {18432, 30, 65536}, {1000, 300, 4000}, {576, 500, 576}, {61, 400, 777}, {1, 3, 1},
		} {
			for _, fill := range []string{"values", "random", "zeros"} {
				t.Run(fmt.Sprintf("%s of %d bytes, %d pages of %d", fill, element, shape.pages, shape.page), func(t *testing.T) {
					data := make([]byte, shape.page*shape.pages)
					switch fill {
					case "values":
						values(data, element)
					case "random":
						copy(data, random(len(data)))
					}
					c := newCoded(t, Config{Threads: 1, Window: 1 << 20}, data, shape.page)
					image := buffer(t, c.GPU, int64(len(data))+64)
					for _, c.image = range []uint64{0, image.Address + 13} {
						on(t, c.GPU, func(th *Thread) error {
							n, stored, err := c.encode(th, shape.extent, element)
							if err != nil {
								return err
							}
							w, k := th.Window(), th.Coder()
							for i, x := range k.Stored[:n] {
								part := c.mem[x.Offset : x.Offset+uint64(x.Len)]
								if xxh3.Hash(part) != k.Sums[i] {
									t.Fatalf("the sum of what is stored of extent %d is wrong", i)
								}
							}
							if fill != "random" && shape.page > 1000 && stored > len(data)*9/10 || stored > len(data) {
								t.Errorf("%d bytes are stored of %d", stored, len(data))
							}
							copy(w.Expected, w.Sums[:n])
							copy(k.Expected, k.Sums[:n])
							if err := c.decode(th, shape.extent, stored, nil); err != nil {
								return err
							}
							right, _, err := c.holds(th)
							if !right {
								t.Error("other bytes came back")
							}
							return err
						})
					}
				})
			}
		}
	}
}

// What is not as it was stored reaches no page, and the coder says why. What is right afterwards does.
func TestCoderRefuses(t *testing.T) {
	data := make([]byte, 20*16384)
	values(data, 2)
	const extent, damaged = 32768, 3
	for name, c := range map[string]struct {
		damage func(c *coded, w *Window, k *Coder)
		rules  string
		want   error
	}{
		"a flipped bit":                {damage: func(c *coded, w *Window, k *Coder) { c.mem[k.Stored[damaged].Offset+99] ^= 1 }, want: ErrSum},
		"a flipped bit on the way":     {rules: "cuMemcpyAsync:flip=5000", want: ErrSum},
		"a wrong byte of the decoder":  {rules: "join:flip=5000", want: ErrSum},
		"another sum of the page":      {damage: func(c *coded, w *Window, k *Coder) { w.Expected[damaged]++ }, want: ErrSum},
		"garbage of fitting checksums": {damage: garble, want: ErrCodec},
		"an unknown codec":             {damage: func(c *coded, w *Window, k *Coder) { k.Stored[damaged].Codec = 9 }, want: ErrCodec},
	} {
		t.Run(name, func(t *testing.T) {
			if c.rules != "" {
				t.Setenv("KVHOST_TEST_GPU", "")
			}
			r := newCoded(t, Config{Threads: 1, Window: 1 << 20}, data, 16384)
			on(t, r.GPU, func(th *Thread) error {
				n, stored, err := r.encode(th, extent, 2)
				if err != nil {
					return err
				}
				w, k := th.Window(), th.Coder()
				copy(w.Expected, w.Sums[:n])
				copy(k.Expected, k.Sums[:n])
				rows, sums, bytes := slices.Clone(k.Stored[:n]), slices.Clone(k.Sums[:n]), slices.Clone(r.mem[:stored])
				pages := slices.Clone(w.Sums[:n])
				if c.damage != nil {
					c.damage(r, w, k)
				}
				if c.rules != "" {
					r.double.Rules(c.rules)
				}
				if err := r.decode(th, extent, stored, nil); !errors.Is(err, c.want) {
					t.Errorf("decode: got %v, want %v", err, c.want)
				}
				if c.rules != "" {
					r.double.Rules("")
				}
				if _, poisoned, err := r.holds(th); err != nil || !poisoned {
					t.Errorf("a page was touched, %v", err)
				}
				copy(k.Stored, rows)
				copy(k.Expected, sums)
				copy(w.Expected, pages)
				copy(r.mem, bytes)
				if err := r.decode(th, extent, stored, nil); err != nil {
					return err
				}
				right, _, err := r.holds(th)
				if !right {
					t.Error("the next decoding finds the gate shut")
				}
				return err
			})
		})
	}
}

// garble writes what no encoder wrote, with the checksum of that.
func garble(c *coded, w *Window, k *Coder) {
	x := k.Stored[3]
	part := c.mem[x.Offset : x.Offset+uint64(x.Len)]
	for i := range part {
		part[i] = 0xff
	}
	k.Expected[3] = xxh3.Hash(part)
}

// Each call that fails is told, and leaves the next one as if nothing had been. A flag stops both ways.
func TestCoderFails(t *testing.T) {
	data := make([]byte, 8*16384)
	values(data, 2)
	t.Setenv("KVHOST_TEST_GPU", "")
	r := newCoded(t, Config{Threads: 1, Window: 1 << 20}, data, 16384)
	flag := r.NewFlag()
	defer flag.Release()
	on(t, r.GPU, func(th *Thread) error {
		n, stored, err := r.encode(th, 65536, 2)
		if err != nil {
			return err
		}
		w, k := th.Window(), th.Coder()
		copy(w.Expected, w.Sums[:n])
		copy(k.Expected, k.Sums[:n])
		rows, image := slices.Clone(k.Stored[:n]), bytes.Clone(r.mem[:stored])
		for _, rules := range []string{"cuLaunchKernel:nth=%d:code=701", "sums:nth=%d:code=1", "encode:nth=%d:code=1",
			"pack:nth=%d:code=1", "decode:nth=%d:code=1", "join:nth=%d:code=1", "cuMemcpyAsync:nth=%d:code=1",
			"cuEventRecord:nth=%d:code=1", "cuEventSynchronize:nth=%d:code=1"} {
			for nth, failed := 1, true; failed; nth++ {
				failed = false
				r.double.Rules(fmt.Sprintf(rules, nth))
				err := r.decode(th, 65536, stored, nil)
				r.double.Rules("")
				right, poisoned, e := r.holds(th)
				if e != nil || !right && (err == nil || !poisoned) {
					t.Errorf("%s, call %d: %v, and other bytes in the pages", rules, nth, err)
				}
				failed = err != nil
				if err := th.Write(r.pages.Address, data); err != nil {
					return err
				}
				r.double.Rules(fmt.Sprintf(rules, nth))
				_, got, err := r.encode(th, 65536, 2)
				r.double.Rules("")
				if err == nil && (got != stored || !bytes.Equal(r.mem[:got], image)) {
					t.Errorf("%s, call %d: no error, and other bytes stored", rules, nth)
				}
				failed = failed || err != nil
				copy(k.Stored, rows)
				copy(r.mem, image)
				if nth == 1 && !failed || nth > 20 {
					t.Fatalf("%s: call %d failed: %v", rules, nth, failed)
				}
			}
		}
		flag.Set()
		b := w.Begin(Gather, flag)
		if _, err := r.add(&b); err != nil {
			return err
		}
		if _, err := k.Encode(&b, r.cut(w, 65536), 2, 0); !errors.Is(err, ErrStopped) {
			t.Errorf("encoded: %v", err)
		}
		if err := r.decode(th, 65536, stored, flag); !errors.Is(err, ErrStopped) {
			t.Errorf("decoded: %v", err)
		}
		if err := k.Read(make([]byte, 1<<20+1)); !errors.Is(err, ErrConfig) {
			t.Errorf("beyond the coder: %v", err)
		}
		return nil
	})
}

// Without memory, without the kernels or without windows there are no coders; repeated failures in a row end them.
func TestWithoutCoders(t *testing.T) {
	g, double := doubled(t, Config{Threads: 1})
	for rules, windows := range map[string]bool{
		"":                                   true,
		"cuMemAlloc_v2:nth=3:code=2":         true,
		"cuModuleLoadData:nth=3:code=222":    true,
		"cuModuleGetFunction:nth=5:code=500": true,
		"cuMemAlloc_v2:nth=2:code=2":         false,
	} {
		double.Rules(rules)
		other, err := g.driver.OpenGPU(g.UUID, Config{Threads: 2, Window: 1 << 20, Codec: true})
		double.Rules("")
		if err != nil {
			t.Fatalf("with rules %q: %v", rules, err)
		}
		if other.FitsWindow(1, 1) != windows || other.FitsCoder(1, 1) != (rules == "") {
			t.Errorf("%q: windows %v, coders %v", rules, other.FitsWindow(1, 1), other.FitsCoder(1, 1))
		}
		for range 2 * failuresToDisable {
			other.CoderFailed(ErrSum)
			other.CoderSucceeded()
		}
		if other.FitsCoder(1, 1) != (rules == "") {
			t.Error("a failure now and then disables the coders")
		}
		for range failuresToDisable {
			other.CoderFailed(ErrSum)
		}
		if other.FitsCoder(1, 1) || other.FitsWindow(1, 1) != windows {
			t.Error("coders that fail again and again are offered")
		}
		testenv.NoError(t, other.Close())
	}
	c := Config{Threads: 2, Window: 1 << 20}
	if without := c.DeviceBytes(); without != 2<<20 {
		t.Errorf("%d bytes without the codec", without)
	}
	c.Codec = true
	if with := c.DeviceBytes(); with < 8<<20 || with > 9<<20 {
		t.Errorf("%d bytes with the codec", with)
	}
}
