package gds

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/abi/testenv"
)

// cpus are those that the calling thread may run on.
func cpus(t *testing.T) (list []int) {
	var set unix.CPUSet
	testenv.NoError(t, unix.SchedGetaffinity(0, &set))
	for cpu := range 1024 {
		if set.IsSet(cpu) {
			list = append(list, cpu)
		}
	}
	return list
}

// A GPU's own threads stay on its CPUs, and a thread that is used again by another GPU goes where that is. CPUs that a
// thread may not use are left out; if none is left, it stays where it is. A caller of Do stays where it was.
func TestThreadsStayNearTheirGPU(t *testing.T) {
	t.Setenv("KVHOST_TEST_GPU", "")
	all := cpus(t)
	last := all[len(all)-1:]
	first, _ := open(t, Config{Threads: 1, Files: 1})
	driver := first.driver
	for _, c := range []struct{ near, want []int }{
		{last, last}, {nil, all}, {append([]int{1000}, last...), last}, {[]int{1000}, all}, {all, all},
	} {
		g, err := driver.OpenGPU(first.UUID, Config{Threads: 2, Files: 2, CPUs: c.near})
		testenv.OK(t, err)
		check := func(*Thread) error {
			if got := cpus(t); !slices.Equal(got, c.want) {
				t.Errorf("near %v: on %v, want %v", c.near, got, c.want)
			}
			return nil
		}
		testenv.OK(t, g.Control(check))
		for range 4 { // each thread gets its turn
			on(t, g, func(*Thread) error {
				if got := cpus(t); !slices.Equal(got, all) {
					t.Errorf("a caller is on %v, was on %v", got, all)
				}
				return nil
			})
			if _, err := g.DoFileFor(0, check); err != nil {
				t.Fatal(err)
			}
		}
		testenv.OK(t, g.Close())
	}
}
