//! Parallel map over a slice with a limited number of threads.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Applies `work` to each item on at most `workers` threads. Results are in the order of the items.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], workers: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(items.len())));
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                while let Some((at, item)) = next_item(&next, items) {
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

fn next_item<'a, T>(next: &AtomicUsize, items: &'a [T]) -> Option<(usize, &'a T)> {
    let at = next.fetch_add(1, Relaxed);
    Some((at, items.get(at)?))
}

#[cfg(test)]
mod tests {
    use super::map;
    use std::sync::Barrier;

    #[test]
    fn results_have_the_order_of_the_items() {
        let items: Vec<usize> = (0..100).collect();
        for workers in [0, 1, 3, 200] {
            assert!(map(&items, workers, |item| item * 2).into_iter().eq((0..100).map(|item| item * 2)));
        }
        assert_eq!(map(&[] as &[u8], 4, |item| *item), Vec::<u8>::new());
    }

    #[test]
    fn items_are_processed_in_parallel() {
        let barrier = Barrier::new(4); // passes only if four items are processed in parallel
        map(&[(); 8], 4, |()| barrier.wait());
    }
}
