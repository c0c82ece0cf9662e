package config

import "testing"

func TestMemoryBefore(t *testing.T) {
	const gib = 1 << 30
	for name, c := range map[string]struct {
		setting   string
		available int64
		change    func(*Config)
		want      int64
	}{
		"a quarter of what is available":         {"auto", 64 * gib, nil, 16 * gib},
		"half of the roots":                      {"auto", 1000 * gib, nil, 50 * gib},
		"a small machine":                        {"auto", 1000 << 20, nil, 0},
		"a machine that does not say":            {"auto", 0, nil, 0},
		"off":                                    {"0", 64 * gib, nil, 0},
		"a size":                                 {"3GiB", 1 * gib, nil, 3 * gib},
		"levels are arranged":                    {"auto", 64 * gib, func(c *Config) { c.Roots[1].Level = 1 }, 0},
		"a root is in memory":                    {"auto", 64 * gib, func(c *Config) { c.Roots[1].Path = "memory:" }, 0},
		"a publication promises a disk":          {"auto", 64 * gib, func(c *Config) { c.Store.Durability = DurabilityStrict }, 0},
		"a size where levels are arranged":       {"1GiB", 64 * gib, func(c *Config) { c.Roots[1].Level = 1 }, 1 * gib},
		"a size though a disk is promised later": {"1GiB", 64 * gib, func(c *Config) { c.Store.Durability = DurabilityStrict }, 1 * gib},
	} {
		l, err := Load(Source{Env: []string{"KVHOST_STORE_MEMORY=" + c.setting, "KVHOST_ROOT=/a=60GiB,/b=40GiB"}})
		if err != nil {
			t.Errorf("%s: store.memory = %s: %v", name, c.setting, err)
			continue
		}
		if c.change != nil {
			c.change(&l.Config)
		}
		if got := l.Config.MemoryBefore(c.available); got != c.want {
			t.Errorf("%s: MemoryBefore(%d) = %d, want %d", name, c.available, got, c.want)
		}
	}
}

func TestWithMemory(t *testing.T) {
	c := Default()
	c.Roots = []Root{{Path: "/a", Capacity: 1 << 30}, {Path: "/b", Capacity: 1 << 30, Level: 1}}
	with := c.WithMemory(1 << 20)
	if err := with.Validate(); err != nil {
		t.Errorf("a configuration with memory is not valid: %v", err)
	}
	if got := []int{with.Roots[0].Level, with.Roots[1].Level, with.Roots[2].Level}; got[0] != 1 || got[1] != 2 || got[2] != 0 ||
		with.Roots[2].Kind() != Memory || with.Roots[2].Write != WriteThrough {
		t.Errorf("roots with memory are %+v, want the memory nearest, written through, and the others one level farther", with.Roots)
	}
	if c.Roots[0].Level != 0 || len(c.Roots) != 2 || c.WithMemory(0) != c {
		t.Errorf("the configuration itself has changed: %+v", c.Roots)
	}
}
