// The observer, which torch calls around each autograd node that runs: for backward passes whose order is not known.

#pragma once

namespace modtrace {

// Calls nest: the observer is on from the first add to the last remove. Both need the interpreter's lock.
void add_observer();
void remove_observer();

}  // namespace modtrace
