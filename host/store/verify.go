package store

import (
	"errors"
	"io/fs"
	"math/rand/v2"

	"github.com/kvhost/kvhost/host/chunk"
)

// Verification says which loads compare a payload with its checksums before a byte of it reaches a page. Size, header,
// namespace, key, rank, plan and geometry are compared at every load.
type Verification uint8

const (
	// Always: every load is verified.
	Always Verification = iota
	// Sampled: a part of the loads is, by lot. One that fails makes its root verify every load until the host's end.
	Sampled
	// Off: none is.
	Off
)

func (v Verification) String() string {
	switch v {
	case Sampled:
		return "sampled"
	case Off:
		return "off"
	}
	return "always"
}

// What a load does not verify it takes on trust. That is right only of a piece of which one can say who wrote it, and
// that it was written to its end. So under Sampled and Off:
//
//   - No victim's file is overwritten in place. A power failure can keep half of the new bytes under the victim's name and
//     header, and only checksums would tell.
//   - Pieces that a start finds are verified at every load, unless the run before ended in order: after a power failure
//     under durability none a file may have its name and its header and not its payload. An orderly end is one in which
//     everything was written out, and the file cleanFile says so; it is removed, durably, before the next run writes.
//   - After an outage of the root, and while its file system is read-only, pieces of this run are verified at every load too:
//     a device that was gone, or that failed, may have lost what it had taken and not yet written. An orderly end does not
//     mend that; it is the checkpoint that says which entries are so, and without it none is trusted.
//   - Pieces of a shared root are verified at every load: what the other hosts' machines went through nobody here knows.

// cleanFile says that the run before ended with all its bytes on disk.
const cleanFile = metaDir + "/clean"

// What cleanFile holds: of all entries, or only of those that the checkpoint does not mark.
const (
	cleanAll  = "ended in order\n"
	cleanPart = "ended in order, the checkpoint says for which entries\n"
)

// trusts says whether loads from this root can go without verification at all.
func (r *root) trusts() bool {
	return r.store.cfg.Verification != Always && !r.cfg.Shared && !r.distrust.Load()
}

// Verifies says whether this load of the piece is to be verified, and is asked once its bytes were read. The answer is drawn
// once; an outage makes it yes.
func (p *Piece) Verifies() bool { return p.verifies || p.outage != p.root.health.outages.Load() }

// unprove ends the trust in everything that is there.
func (r *root) unprove() {
	r.health.outages.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proven = false // of what a scan has yet to find
	r.x.each(func(_ uint32, e *entry) { e.set(stUnproven) })
}

// verifying decides about one load.
func (r *root) verifying(unproven bool) bool {
	if unproven || !r.trusts() {
		return true
	}
	if r.store.cfg.Verification == Off {
		return false
	}
	return rand.Float64() < r.store.cfg.VerifyShare
}

// doubted is called for each piece that failed: trust in the others of its root is over.
func (r *root) doubted(cause error) {
	if errors.Is(cause, chunk.ErrChecksum) && r.trusts() && !r.distrust.Swap(true) {
		r.log.Error("a sampled load failed its verification; from now on every load from this root is verified", "error", cause)
	}
}

// endClean writes everything out and says so. Nothing else uses the root any more.
func (r *root) endClean() {
	if !r.trusts() {
		return
	}
	text := cleanAll
	r.mu.Lock()
	r.x.each(func(_ uint32, e *entry) {
		if e.is(stUnproven) {
			text = cleanPart
		}
	})
	r.mu.Unlock()
	err := r.fs.SyncFS(r.dir)
	if err == nil {
		err = r.writeMeta(r.dir+"/"+cleanFile, []byte(text))
	}
	if err == nil {
		err = r.fs.SyncDir(r.dir + "/" + metaDir)
	}
	if err != nil {
		r.log.Warn("the root's bytes could not all be written out; the next run verifies every load of them", "error", err)
	}
}

// beginUnclean takes the last run's word, once, that its bytes are on disk.
func (r *root) beginUnclean() error {
	text, rerr := r.readMeta(r.dir + "/" + cleanFile)
	err := r.fs.Remove(r.dir + "/" + cleanFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = r.fs.SyncDir(r.dir + "/" + metaDir)
		r.proven = err == nil && rerr == nil
		r.partly = string(text) != cleanAll
	}
	return err
}
