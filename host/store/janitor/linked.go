package janitor

import "github.com/kvhost/kvhost/staging"

// A file with several names takes its bytes once, and gives them back with the last of them.

type inode struct{ dev, ino uint64 }

// found is what a round knows of a file with several names: how many the directory has, and what it takes.
type found struct {
	names int
	bytes int64
}

// count enters a name, and returns the bytes that it adds.
func (j *Janitor) count(rel string, info staging.Info) file {
	f := file{rel: rel, bytes: info.Allocated}
	if info.Links > 1 {
		f.inode = inode{info.Dev, info.Ino}
		l := j.linked[f.inode]
		if l.names > 0 {
			f.bytes = 0
		}
		j.linked[f.inode] = found{l.names + 1, info.Allocated}
	}
	return f
}

// freed is the bytes that a file gave back with its name: those of a file with several names go with the last one.
func (j *Janitor) freed(f file) int64 {
	if f.inode == (inode{}) {
		return f.bytes
	}
	l := j.linked[f.inode]
	l.names--
	j.linked[f.inode] = l
	if l.names > 0 {
		return 0
	}
	return l.bytes
}
