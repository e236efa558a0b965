//! Work on many things by a few threads.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// `work` of each item, on at most `workers` threads; results in the order of the items.
pub(super) fn each<T: Sync, R: Send>(items: &[T], workers: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(items.len())));
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                while let Some((at, item)) = taken(&next, items) {
                    let result = work(item);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

fn taken<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let at = next.fetch_add(1, Relaxed);
    Some((at, items.get(at)?))
}

#[cfg(test)]
mod tests {
    use super::each;
    use std::sync::Barrier;

    #[test]
    fn results_have_the_order_of_the_items() {
        let items: Vec<usize> = (0..100).collect();
        for workers in [0, 1, 3, 200] {
            assert!(each(&items, workers, |item| item * 2).into_iter().eq((0..100).map(|item| item * 2)));
        }
        assert_eq!(each(&[] as &[u8], 4, |item| *item), Vec::<u8>::new());
    }

    #[test]
    fn work_is_done_side_by_side() {
        let all_are_here = Barrier::new(4); // ends only if four work at once
        each(&[(); 8], 4, |()| all_are_here.wait());
    }
}
