package staging

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"sync"
)

// Walk calls visit for every file below dir, on several goroutines, and returns when all are done. Hidden directories
// are left out; links are not followed. skipped gets directories below dir that cannot be read, such as a mount's
// lost+found. It also gets, with [ErrForeign], directories that contain a directory with the name mark; they are not
// entered.
func Walk(ctx context.Context, fsys FS, dir, mark string, workers int,
	visit func(rel string, e fs.DirEntry), skipped func(rel string, err error)) error {
	w := &walker{ctx: ctx, fs: fsys, dir: dir, mark: mark, visit: visit, skipped: skipped, todo: []string{""}}
	w.more.L = &w.mu
	var all sync.WaitGroup
	for range workers {
		all.Go(w.run)
	}
	all.Wait()
	return errors.Join(w.err, ctx.Err())
}

// readTries is the number of attempts to read a directory before it is skipped.
const readTries = 3

// walker is a stack of directories to read, and the number of directories being read.
type walker struct {
	ctx     context.Context
	fs      FS
	dir     string
	mark    string
	visit   func(string, fs.DirEntry)
	skipped func(string, error)

	mu   sync.Mutex
	more sync.Cond // signals, under mu, that todo or busy has changed
	todo []string
	busy int
	err  error
}

func (w *walker) run() {
	for {
		rel, ok := w.next()
		if !ok {
			return
		}
		found, err := w.read(rel)
		w.mu.Lock()
		w.busy--
		w.todo = append(w.todo, found...)
		if err != nil && w.err == nil {
			w.err = err
		}
		w.more.Broadcast()
		w.mu.Unlock()
	}
}

func (w *walker) next() (string, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.todo) == 0 && w.busy > 0 && w.err == nil {
		w.more.Wait()
	}
	if len(w.todo) == 0 || w.err != nil || w.ctx.Err() != nil {
		return "", false
	}
	last := len(w.todo) - 1
	rel := w.todo[last]
	w.todo = w.todo[:last]
	w.busy++
	return rel, true
}

// read visits a directory's files and returns its subdirectories.
func (w *walker) read(rel string) (dirs []string, err error) {
	var list []fs.DirEntry
	for range readTries {
		if list, err = w.fs.ReadDir(w.dir + "/" + rel); err == nil || errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if rel != "" && slices.ContainsFunc(list, func(e fs.DirEntry) bool { return e.IsDir() && e.Name() == w.mark }) {
		err = ErrForeign
	}
	if err != nil {
		if rel == "" {
			return nil, err
		}
		if !errors.Is(err, fs.ErrNotExist) { // otherwise it was removed with its last file
			w.skipped(rel, err)
		}
		return nil, nil
	}
	for _, e := range list {
		if w.ctx.Err() != nil {
			return nil, nil
		}
		name := e.Name()
		if rel != "" {
			name = rel + "/" + name
		}
		if !e.IsDir() {
			w.visit(name, e)
		} else if e.Name()[0] != '.' {
			dirs = append(dirs, name)
		}
	}
	return dirs, nil
}
