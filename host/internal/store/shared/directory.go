package shared

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/staging"
)

// directory is the [medium] of a root in a directory.
type directory struct {
	tree
	m *Member

	// of this incarnation
	dir   string
	out   writer
	temps []string // temporaries to be removed, whose pieces are logged
	tails map[string]*tail
	live  []string // members in the last listing
	dead  []string // members whose membership has ended, in the last listing: those below gone

	epochs epochs
	beat   beat // of the evictor, as read last

	// of this host's term
	mine     beat
	removed  uint64 // files moved to the trash
	littered bool   // set while the trash may hold files, which have no other name
}

// join creates the directory of a new incarnation, and moves those of earlier ones away.
func (d *directory) join() error {
	m := d.m
	d.dir, d.out, d.temps, d.tails = d.hosts()+"/"+m.name, writer{}, nil, map[string]*tail{}
	for _, dir := range []string{d.hosts(), d.gone()} {
		if err := d.fs.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	for _, dir := range []string{d.dir, d.dir + "/t"} {
		if err := d.fs.Mkdir(dir, 0o700); err != nil { // The directory of an earlier join is never used again, since the others may have expelled it.
			return err
		}
	}
	if err := d.probeLinks(d.dir); err != nil {
		return err
	}
	names, err := d.list(d.hosts())
	if err != nil {
		return err
	}
	for _, name := range names {
		if name != m.name && m.isOwn(name) {
			if err := d.moveAway(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// moveAway ends a membership: no operation of the member succeeds any more.
func (d *directory) moveAway(member string) error {
	return ignoreMissing(d.fs.Rename(d.hosts()+"/"+member, d.gone()+"/"+member))
}

// probe and probed are the names of the two links that probeLinks makes among the temporaries.
const probe, probed = "probe", "probed"

// probeLinks returns ErrLinks if the file system has no hard links.
func (t *tree) probeLinks(dir string) error {
	a, b := dir+"/t/"+probe, dir+"/t/"+probed
	if err := t.put(a, status{}); err != nil {
		return err
	}
	err := t.fs.Link(a, b)
	switch {
	case err == nil:
		err = t.unlink(b)
	case !missing(err):
		err = fmt.Errorf("%w: %w", ErrLinks, err)
	}
	return errors.Join(err, t.unlink(a))
}

// leave moves this member's directory to gone, where the others remove it.
func (d *directory) leave(bool) error {
	m := d.m
	err := d.moveAway(m.name)
	if m.term != nil {
		err = errors.Join(err, ignoreMissing(d.fs.Rename(d.office(), d.old(m.term.number))))
	}
	return err
}

// look reads the evictor's heartbeat, this member's grant and the names of the batches, and then lists the members.
func (d *directory) look(now time.Duration) (err error) {
	m := d.m
	if err := d.readEpochs(now); err != nil {
		return err
	}
	m.view.admits, m.view.batches = false, nil
	if m.view.number != 0 {
		if err := d.readGrant(); err != nil {
			return err
		}
	}
	if m.admitted && d.beat.Took { // Until then, the evictor has not copied the journals of earlier epochs.
		if m.view.batches, err = d.readJournal(d.epochDir(m.view.number)); err != nil {
			return err
		}
		if there, err := d.exists(d.epochDir(m.view.number)); !there {
			m.view.batches = nil // The evictor was deposed; its successor continues with the same batches.
			if err != nil {
				return err
			}
		}
	}
	if d.live, err = d.list(d.hosts()); err != nil {
		return err
	}
	if d.dead, err = d.list(d.gone()); err != nil {
		return err
	}
	for name := range m.peers {
		if m.peers[name].here = false; !slices.Contains(d.live, name) && !slices.Contains(d.dead, name) {
			delete(m.peers, name)
			delete(d.tails, name)
		}
	}
	for _, name := range d.live {
		m.peer(name).here = !slices.Contains(d.dead, name)
	}
	for _, name := range d.dead {
		m.peer(name)
	}
	if m.term == nil {
		return nil
	}
	for i, name := range slices.Concat(d.live, d.dead) {
		dir, p := d.hosts(), m.peer(name)
		if i >= len(d.live) {
			dir = d.gone()
		}
		if name == m.name {
			continue
		}
		if err := d.readStatus(dir+"/"+name, p, now); err != nil && !missing(err) {
			return err
		}
	}
	return nil
}

func (d *directory) readStatus(dir string, p *peer, now time.Duration) error {
	var s status
	err := d.get(dir+"/status", &s, mostStatus(len(d.m.peers)))
	if err == nil {
		err = s.check()
	}
	if errors.Is(err, ErrDamaged) || odd(err) {
		d.m.log.Warn("cannot read a member's status", "error", err)
		return nil
	}
	if err == nil && s.Beat != p.Beat {
		p.status, p.seenAt = s, now
	}
	return err
}

// grantFile is the content of a grant file: the total credit granted to a member.
type grantFile struct {
	Granted int64 `json:"granted"`
}

// granted reads a member's grant.
func (d *directory) granted(dir, member string) (int64, error) {
	var g grantFile
	err := d.get(grantName(dir, member), &g, mostGrant)
	if err == nil && (g.Granted < 0 || g.Granted > mostTotal) {
		err = fmt.Errorf("%w: a grant of %d bytes", ErrDamaged, g.Granted)
	}
	return g.Granted, err
}

func (d *directory) readGrant() error {
	granted, err := d.granted(d.epochDir(d.m.view.number), d.m.name)
	switch {
	case errors.Is(err, ErrDamaged):
		d.m.log.Warn("cannot read a grant", "error", err)
		return nil
	case missing(err):
		return nil
	case err == nil:
		d.m.view.admits, d.m.view.granted = true, granted
	}
	return err
}

func grantName(dir, member string) string { return dir + "/grants/" + member }

// In the evictor's journal, j<n> is the proposal of a batch and d<n> its decision.
func proposalName(dir string, n uint64) string { return dir + "/journal/j" + strconv.FormatUint(n, 10) }
func decisionName(dir string, n uint64) string { return dir + "/journal/d" + strconv.FormatUint(n, 10) }

// readJournal lists the batches of the journal in dir.
func (t *tree) readJournal(dir string) (batches map[uint64]bool, err error) {
	batches = map[uint64]bool{}
	names, err := t.list(dir + "/journal")
	for _, name := range names {
		if n, err := strconv.ParseUint(name[1:], 10, 64); err == nil && (name[0] == 'j' || name[0] == 'd') {
			batches[n] = batches[n] || name[0] == 'd'
		}
	}
	return batches, err
}

func (d *directory) batch(n uint64) (string, []Victim, error) {
	var f batchFile
	if err := d.get(proposalName(d.epochDir(d.m.view.number), n), &f, mostBatch); err != nil {
		return "", nil, err
	}
	victims, err := decodeVictims(f.Victims)
	return f.Forget, victims, err
}

func (d *directory) decision(n uint64) (v decision, err error) {
	err = d.get(decisionName(d.epochDir(d.m.view.number), n), &v, mostDecision)
	return v, err
}

func (d *directory) tell(s *status, _ time.Duration) (bool, error) {
	err := d.put(d.dir+"/status", s)
	if missing(err) {
		err = ErrFenced
	}
	return err == nil, err
}

// temp returns a path in the directory of the incarnation that took the credit, with which it is removed.
func (d *directory) temp(name string, credit Credit) string {
	return d.hosts() + "/" + d.m.cfg.member(credit.life) + "/t/" + path.Base(name)
}

// store links a temporary to its target name. A link call that returns an error may have succeeded: a network file system may
// lose the reply, or the call was abandoned and continues. The link count of the temporary tells.
func (d *directory) store(p *doubt) (made bool, err error) {
	if err = d.fs.Link(p.temp, p.target); err == nil {
		return true, nil
	}
	if absent(err) {
		if d.absent(p.temp) {
			err = fmt.Errorf("%w: %w", ErrFenced, err)
		}
		return false, err
	}
	info, serr := d.fs.Stat(p.temp)
	switch {
	case serr == nil && info.Links > 1:
		return true, nil
	case serr == nil && !errors.Is(err, staging.ErrHung):
		return false, err
	case absent(serr):
		if missing(err) {
			err = fmt.Errorf("%w: %w", ErrFenced, err)
		}
		return false, err
	}
	// fs.ErrExist must not be returned here: the file under the name may be this temporary rather than another host's piece.
	return false, fmt.Errorf("%w: linking %s: %v; the look at it: %v", ErrDoubt, p.target, err, serr)
}

// happened checks whether a link was made. If not, it removes the temporary, so that the link can no longer succeed. No file is
// open during the check: a client of a network file system renames a file that it has open instead of removing it, and the link
// count would be wrong.
func (d *directory) happened(p *doubt) (made, over bool, err error) {
	info, err := d.fs.Stat(p.temp)
	if err == nil && info.Links > 1 {
		return true, false, nil
	}
	gone := absent(err) // The temporary went with the incarnation, or in an earlier check that failed half way.
	if err == nil {
		err = d.unlink(p.temp)
	}
	if err != nil && !gone {
		return false, false, err
	}
	// The file under the target name is a piece of the same key. If the temporary is gone it cannot be told which host
	// published it.
	now, err := d.fs.Stat(p.target)
	if absent(err) {
		return false, true, nil
	}
	made = err == nil && (gone || now.Same(info))
	return made, !made, err
}

// tree is the protocol's directory tree, in which every member reads and writes files.
type tree struct {
	fs   staging.FS
	base string // <root>/.kvhost/shared
	part []byte // buffer for reading logs
}

// Hosts returns the hosts that share a root. The list includes hosts that were killed and not removed since.
func Hosts(fsys staging.FS, root string) (names []string, err error) {
	list, err := fsys.ReadDir((&tree{base: root + "/" + Dir}).hosts())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names, err
}

func (t *tree) hosts() string            { return t.base + "/hosts" }
func (t *tree) gone() string             { return t.base + "/gone" }
func (t *tree) epochDir(n uint64) string { return t.base + "/e" + strconv.FormatUint(n, 10) }

// put replaces a control file, by a rename within its directory.
func (t *tree) put(name string, v any) error {
	b, err := EncodeControl(v)
	if err != nil {
		return err
	}
	return pieceformat.ReplaceFile(t.fs, name+".new", name, false, pieceformat.Holding(b))
}

// keep replaces a control file durably. It is used for files that others rely on after a power loss.
func (t *tree) keep(name string, v any) error {
	b, err := EncodeControl(v)
	if err != nil {
		return err
	}
	return t.keepBytes(name, b)
}

// keepBytes replaces a file durably, its name included.
func (t *tree) keepBytes(name string, b []byte) error {
	if err := pieceformat.ReplaceFile(t.fs, name+".new", name, true, pieceformat.Holding(b)); err != nil {
		return err
	}
	return t.fs.SyncDir(name[:strings.LastIndexByte(name, '/')])
}

func (t *tree) getBytes(name string, most int64) ([]byte, error) {
	b, _, err := pieceformat.ReadFile(t.fs, name, most)
	if errors.Is(err, pieceformat.ErrDamaged) || odd(err) {
		err = fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return b, err
}

func (t *tree) get(name string, v any, most int64) error {
	b, err := t.getBytes(name, most)
	if err != nil {
		return err
	}
	if err := DecodeControl(b, v); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// list returns the names in a directory. It returns none if the directory does not exist.
func (t *tree) list(dir string) ([]string, error) {
	entries, err := t.fs.ReadDir(dir)
	if absent(err) {
		return nil, nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// removeAll removes a directory and its contents. A missing name is not an error.
func (t *tree) removeAll(dir string) error {
	entries, err := t.fs.ReadDir(dir)
	if err != nil && !odd(err) {
		return ignoreMissing(err)
	}
	for _, e := range entries {
		name := dir + "/" + e.Name()
		if e.IsDir() {
			err = t.removeAll(name)
		} else {
			err = t.unlink(name)
		}
		if err != nil {
			return err
		}
	}
	return t.unlink(dir)
}

func (t *tree) unlink(name string) error {
	return ignoreMissing(t.fs.Remove(name))
}

// exists reports whether a name exists. On an error this is unknown.
func (t *tree) exists(name string) (bool, error) {
	_, err := t.fs.Stat(name)
	if absent(err) {
		return false, nil
	}
	return err == nil, err
}

// absent reports whether a name is known not to exist.
func (t *tree) absent(name string) bool {
	there, err := t.exists(name)
	return !there && err == nil
}

// missing reports whether an error means that a name does not exist or names another file now, for example because the file was
// replaced while it was read.
func missing(err error) bool { return absent(err) || errors.Is(err, unix.ESTALE) }

// absent reports whether an error proves that a name does not exist. ESTALE does not: a directory that could not be listed may
// have entries.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// odd reports whether something that no member makes has the name of a file or of a directory: a pipe, a link, the other kind.
func odd(err error) bool {
	return errors.Is(err, staging.ErrNotRegular) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

func ignoreMissing(err error) error {
	if absent(err) {
		return nil
	}
	return err
}
