// Package config is the configuration of kvhost: one struct, filled from defaults, a TOML file, the environment and
// flags, in that order, and validated in one place.
//
// Every key is a field of [Config] with its tags: see [Key]. Its default and its meaning are in kvhost.toml, which is also the
// commented example file. The readers of the file, of the environment and of the flags, and the printer of the effective
// configuration, all walk these fields. They therefore know the same keys. The TOML library decodes to a tree and not to the
// fields, because it would stop at the first value of a wrong type, and because variables and flags are set in the same way as
// values from the tree.
//
// A key is written `name` in the TOML section `[section]`, KVHOST_SECTION_NAME in the environment and --section-name
// on the command line. Sizes are whole bytes or text with a unit (64KiB, 1.5GiB, 2GB); durations are text (250ms, 30s).
// Relative paths are relative to the working directory.
package config
