// Package config is the configuration of kvhost: one struct, filled from defaults, a TOML file, the environment and
// flags, in that order, and validated in one place.
//
// Every key is one row of a table (see [Keys]) with its name, kind, default, unit and help. Reading the file, the
// environment and the flags, printing the effective configuration with the origin of each value, and the commented
// example file all use that table, so that none of them knows a key that another does not.
//
// A key is written `name` in the TOML section `[section]`, KVHOST_SECTION_NAME in the environment and --section-name
// on the command line. Sizes are whole bytes or text with a unit (64KiB, 1.5GiB, 2GB); durations are text (250ms, 30s).
// Relative paths are relative to the working directory.
package config
