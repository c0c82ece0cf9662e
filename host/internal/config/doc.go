// Package config is the configuration of kvhost: one struct, filled from defaults, a TOML file, the environment and
// flags, in that order, and validated in one place.
//
// Every key is a field of [Config] with its tags (see [Key]); kvhost.toml, which is the commented example file, too, has its
// default and its meaning. Reading the file, the environment and the flags, and printing the effective configuration with the
// origin of each value walk these fields, so that none of them knows a key that another does not. The TOML library decodes
// to a tree and not to the fields: it ends at the first value of a wrong type, and variables and flags are set in the same way.
//
// A key is written `name` in the TOML section `[section]`, KVHOST_SECTION_NAME in the environment and --section-name
// on the command line. Sizes are whole bytes or text with a unit (64KiB, 1.5GiB, 2GB); durations are text (250ms, 30s).
// Relative paths are relative to the working directory.
package config
