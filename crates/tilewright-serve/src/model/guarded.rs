//! Calls of a library that panics on malformed files: the panic becomes `None` and prints nothing.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook},
    sync::Once,
};

thread_local! {
    /// Whether this thread is inside [`call`].
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// The result of `work`; `None` if it panics. `work` must not leave shared state half changed.
pub(super) fn call<T>(work: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    // The hook belongs to the process. Other threads, and this one outside `call`, keep the previous hook.
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                previous(panic);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work)).ok();
    GUARDED.set(outer);
    result
}

#[cfg(test)]
mod tests {
    use super::{GUARDED, call};

    #[test]
    fn a_panic_is_none_and_ends_the_guard() {
        assert_eq!(call(|| 1), Some(1));
        let nested = call(|| {
            assert_eq!(call(|| panic!("planted")), None::<()>);
            GUARDED.get()
        });
        assert_eq!((nested, GUARDED.get()), (Some(true), false));
    }
}
