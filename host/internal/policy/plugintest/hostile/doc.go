// Package hostile constructs modules that attack a host: they claim what they do not have, cost more than they say, trap,
// lie and loop. Every class is one way in which an outside attacker broke, or tried to break, a host. The modules are the
// same in every run.
package hostile
