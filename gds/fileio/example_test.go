package fileio_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/gds/fileio"
)

// Example reads a file into memory of the first GPU, past the page cache where cuFile can.
func Example() {
	driver, err := gds.Open(nil)
	if err != nil {
		return // no driver
	}
	devices, err := driver.Devices()
	if err != nil || len(devices) == 0 {
		return
	}
	gpu, err := driver.OpenGPU(devices[0].UUID, gds.Config{Threads: 2})
	if err != nil {
		return
	}
	defer gpu.Close()
	memory, err := gpu.Alloc(1 << 30)
	if err != nil {
		return
	}
	defer memory.Free()
	if _, err := load(gpu, nil, "weights", memory.Address, 1<<30); err != nil {
		return
	}
}

// load reads the first bytes of a file into device memory, and says by which route. cufile may be nil.
func load(gpu *gds.GPU, cufile *gds.CuFile, name string, address uint64, size int64) (route fileio.Route, err error) {
	io, err := fileio.New(gpu, cufile, fileio.Auto, 2)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, io.Close()) }()
	file, err := io.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return file.Read(address, size, 0)
}

// The example's function brings the file's bytes to the GPU, with and without cuFile.
func TestExample(t *testing.T) {
	g, double := doubled(t, gds.Config{Threads: 2})
	const size = 5 << 20
	want, name := random(size), filepath.Join(t.TempDir(), "weights")
	if err := os.WriteFile(name, want, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[fileio.Route]*gds.CuFile{fileio.ByStaging: nil, fileio.ByCuFile: openCuFile(t, g, double.Path)} {
		to, got := buffer(t, g, size), make([]byte, size)
		route, err := load(g, c, name, to.Address, size)
		if err != nil || route != what {
			t.Errorf("want route %d, got %d and %v", what, route, err)
		}
		on(t, g, func(th *gds.Thread) error { return th.Read(got, to.Address) })
		if !bytes.Equal(got, want) {
			t.Errorf("route %d: want the file's bytes in device memory, got others", route)
		}
	}
}
