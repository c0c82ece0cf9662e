package gds

import (
	"cmp"
	"errors"
	"fmt"
	"unsafe"

	"github.com/kvhost/kvhost/gds/internal/kernels"
)

// Coder is device memory next to the [Window] of a copy thread. There the GPU codes extents between the window and
// their stored form, so that only stored bytes cross the bus:
//
//	store:  pages --gather--> window --checksums, encode--> stored bytes --checksums--> host
//	load:   host --> stored bytes --checksums, compared--> --decode--> window --checksums, compared--> --scatter--> pages
//
// The stored form is that of host/internal/codec: byte planes in Huffman codes. Stored bytes with a wrong checksum
// reach no decoder, and page bytes with a wrong checksum reach no page.
type Coder struct {
	Stored   []Extent // by extent of the window: its place among the stored bytes, and its codec
	Sums     []uint64 // checksums of the stored bytes, by extent
	Expected []uint64 // the expected Sums

	t                      *Thread
	coded, scratch, planes uint64
	pageRows, storedRows   uint64 // addresses on the GPU of the window's extents and of Stored
	size                   int    // bytes of coded
}

// coderBytes returns the device memory of the coder of a window of the given bytes: for stored bytes, for planes of
// twice the window's length, and for two rows per extent.
func coderBytes(window int) (coded, scratch, planes uint64) {
	round := func(n int) uint64 { return (uint64(n) + 255) &^ 255 }
	return round(window + 64), round(2*window + 64), 2 * windowExtents * uint64(unsafe.Sizeof(Extent{}))
}

// DeviceBytes returns the device memory of windows and coders.
func (c *Config) DeviceBytes() int64 {
	bytes := int64(c.Window)
	if c.Codec && c.Window > 0 {
		coded, scratch, planes := coderBytes(c.Window)
		bytes += int64(coded + scratch + planes)
	}
	return int64(c.Threads) * bytes
}

// makeCoders loads the kernels and allocates the memory of all coders, if there are windows. If memory is short there
// are no coders.
func (t *Thread) makeCoders() error {
	g := t.gpu
	if !g.cfg.Codec || g.windows.bytes.Load() == 0 || g.Err() != nil {
		return nil
	}
	coded, scratch, planes := coderBytes(g.cfg.Window)
	each := coded + scratch + planes
	err := t.loadCodec()
	if err == nil {
		err = t.call(&g.driver.fn.memAlloc, t.outAt(0), uintptr(each)*uintptr(g.cfg.Threads))
	}
	if err != nil {
		if Sticky(err) {
			return err
		}
		g.driver.log.Warn("no codec on the GPU: the CPU codes compressed pieces", "gpu", g.UUID.String(), "bytes",
			each*uint64(g.cfg.Threads), "error", err)
		return nil
	}
	g.coders.at = t.out[0]
	for i, other := range g.all[:g.cfg.Threads] {
		c, at := &other.coder, g.coders.at+uint64(i)*each
		c.t, c.size, c.coded, c.scratch, c.planes = other, g.cfg.Window, at, at+coded, at+coded+scratch
		c.pageRows, _ = g.driver.pinnedAt(bytesOf(other.window.Extents)) // bind has put both into registered memory
		c.storedRows, _ = g.driver.pinnedAt(bytesOf(c.Stored))
	}
	g.coders.bytes.Store(int64(g.cfg.Window))
	return nil
}

// loadCodec loads the codec's kernels from one module.
func (t *Thread) loadCodec() (err error) {
	k := &t.gpu.kernels
	if k.encode, err = t.load(kernels.Codec, kernels.EncodeEntry); err != nil {
		return err
	}
	for entry, to := range map[string]*kernel{kernels.PackEntry: &k.pack, kernels.DecodeEntry: &k.decode,
		kernels.JoinEntry: &k.join} {
		if *to, err = t.entry(k.encode.module, entry); err != nil {
			return err
		}
	}
	return nil
}

// FitsCoder reports whether the copy threads have coders for the given page bytes and extents. There are no coders if
// they are not configured, after a lack of memory, without windows, and after repeated failures.
func (g *GPU) FitsCoder(bytes int64, extents int) bool {
	return bytes <= g.coders.bytes.Load() && g.FitsWindow(bytes, extents) && g.Mode() == Kernel
}

// CoderFailed records that a coder failed or made wrong bytes. Failures in a row, without [GPU.CoderSucceeded] between
// them, disable the coders for good.
func (g *GPU) CoderFailed(cause error) {
	if !g.coders.failed() {
		g.driver.log.Warn("the GPU's codec failed, the CPU codes these extents", "gpu", g.UUID.String(), "error", cause)
	} else if g.coders.bytes.Swap(0) > 0 {
		g.driver.log.Error("the GPU's codec disabled: the CPU codes compressed pieces", "gpu", g.UUID.String(),
			"error", cause)
	}
}

// CoderSucceeded resets the count of [GPU.CoderFailed].
func (g *GPU) CoderSucceeded() { g.coders.succeeded() }

// Coder returns the thread's coder, if [GPU.FitsCoder] is true.
func (t *Thread) Coder() *Coder { return &t.coder }

// Encode ends a batch that gathers into the window. It computes the checksums of the first n extents of the window, and
// encodes the extents to the device memory at to, which must have room for all their page bytes. It sets Stored and
// Sums, and returns the number of stored bytes, which are never more than the page bytes. If to is 0 the stored bytes
// stay in the coder, and [Coder.Read] copies them to the host. element is the size in bytes of the values in the
// extents: 2 for floats of 16 bits, 1 for all others.
func (c *Coder) Encode(b *Batch, n, element int, to uint64) (stored int, err error) {
	t, w := c.t, &c.t.window
	to = cmp.Or(to, c.coded)
	err = b.queue()
	if err == nil {
		err = t.beginSum(w.address, w.Extents[:n], w.Sums[:n], nil, 0, n)
	}
	if err == nil {
		err = c.launch(t.gpu.kernels.encode, n*element, kernels.EncodeThreads, w.address, c.scratch, c.planes,
			c.pageRows, uint64(n), uint64(element))
	}
	if err == nil {
		err = c.launch(t.gpu.kernels.pack, n, kernels.PackThreads, w.address, c.scratch, c.planes, c.pageRows,
			uint64(n), uint64(element), to, c.storedRows)
	}
	if err == nil {
		err = t.beginSum(to, c.Stored[:n], c.Sums[:n], nil, 0, n)
	}
	err = errors.Join(err, t.wait()) // no copy may run after the return
	if err == nil && b.flag.IsSet() {
		err = ErrStopped
	}
	for i := 0; i < n && err == nil; i++ {
		x, page := &c.Stored[i], &w.Extents[i]
		if x.Offset != uint64(stored) || x.Len == 0 || x.Len > page.Len ||
			x.Codec == 0 && (x.Len != page.Len || c.Sums[i] != w.Sums[i]) {
			err = fmt.Errorf("%w: extent %d of %d bytes is stored at %d in %d, by codec %d", ErrCodec, i, page.Len,
				x.Offset, x.Len, x.Codec)
		}
		stored += int(x.Len)
	}
	return stored, err
}

// Read copies the first stored bytes from the coder to dst.
func (c *Coder) Read(dst []byte) error {
	if err := c.check(len(dst)); err != nil {
		return err
	}
	return c.t.Read(dst, c.coded)
}

// Upload starts to copy src, stored bytes of extents, to the coder, and returns their address there. src is in use
// until b's [Batch.Wait] returns nil or, after an error, until [Window.Sync] returns.
func (c *Coder) Upload(b *Batch, src []byte) (at uint64, err error) {
	if err := c.check(len(src)); err != nil {
		return 0, err
	}
	return c.coded, c.t.call(&c.t.gpu.driver.fn.memcpyAsync, uintptr(c.coded), startOf(src), uintptr(len(src)), c.t.stream)
}

// Decode starts to decode the stored bytes at the device address from to the first n extents of the window. b scatters
// from the window. If a checksum of stored bytes or of page bytes is wrong, or no encoder wrote the bytes, b moves
// nothing, and [Coder.Check] returns the reason. Rows and sums are in use as long as the source of [Coder.Upload].
func (c *Coder) Decode(b *Batch, from uint64, n int) error {
	t, w := c.t, &c.t.window
	b.uploading, b.kernelOnly = true, true
	err := b.nextEpoch()
	if err == nil {
		err = t.beginSum(from, c.Stored[:n], c.Sums[:n], c.Expected[:n], b.epoch, n)
	}
	if err == nil {
		err = c.launch(t.gpu.kernels.decode, 2*n, kernels.DecodeThreads, from, c.scratch, c.pageRows, c.storedRows,
			uint64(n), t.halted, uint64(b.epoch))
	}
	if err == nil {
		err = c.launch(t.gpu.kernels.join, n, kernels.JoinThreads, from, c.scratch, w.address, c.pageRows,
			c.storedRows, uint64(n), t.halted, uint64(b.epoch))
	}
	if err == nil {
		err = t.beginSum(w.address, w.Extents[:n], w.Sums[:n], w.Expected[:n], b.epoch, n)
	}
	return err
}

// Check returns the reason for which a batch after [Coder.Decode] scattered nothing: the first extent with a wrong
// checksum of stored or page bytes ([ErrSum]), or that no encoder wrote ([ErrCodec]). It returns nil if the batch
// scattered. Call it after the end of the batch.
func (c *Coder) Check(n int) error {
	w := &c.t.window
	for i, want := range c.Expected[:n] {
		if got := c.Sums[i]; got != want {
			return fmt.Errorf("%w: extent %d is stored with %016x, want %016x", ErrSum, i, got, want)
		}
	}
	for i := range w.Extents[:n] {
		if w.Extents[i].Codec != 0 {
			return fmt.Errorf("%w: extent %d, by codec %d", ErrCodec, i, c.Stored[i].Codec)
		}
	}
	if i := w.Differs(n); i >= 0 {
		return fmt.Errorf("%w: extent %d is decoded to %016x, want %016x", ErrSum, i, w.Sums[i], w.Expected[i])
	}
	return nil
}

// launch starts one of the codec's kernels.
func (c *Coder) launch(k kernel, blocks, threads int, params ...uint64) error {
	copy(c.t.params[:], params)
	return c.t.start(k, blocks, threads)
}

func (c *Coder) check(n int) error {
	if n > c.size {
		return fmt.Errorf("%w: %d stored bytes of a coder of %d", ErrConfig, n, c.size)
	}
	return nil
}
