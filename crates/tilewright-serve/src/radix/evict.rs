//! Eviction: pages leave the tree, the least recently used first.
//!
//! Invariant: the candidates are exactly the unlocked leaves. No node was used later than its parent and none is
//! locked unless its parent is, so the oldest candidate is the oldest unlocked node of the whole tree.

use super::RadixTree;
use crate::pages::PageId;

impl RadixTree {
    /// Takes `count` unlocked pages out of the tree, or all of them ([`num_evictable`](Self::num_evictable)) when
    /// there are fewer. They are then the caller's, to be freed.
    ///
    /// Pages go in the order of their last access and, on one path, from its end. The last leaf may lose only a
    /// part of its pages; the id of a node that lost a page is stale.
    #[must_use = "the pages are the caller's to free"]
    pub fn evict(&mut self, count: usize) -> Vec<PageId> {
        let mut evicted = Vec::with_capacity(count.min(self.num_evictable));
        while evicted.len() < count
            && let Some(&(_, leaf)) = self.candidates.first()
        {
            let wanted = count - evicted.len();
            if let Some(kept) = self.nodes[leaf].pages.len().checked_sub(wanted)
                && kept > 0
            {
                // The kept pages get a node of their own: whoever still has the id of the leaf must not be able
                // to lock a shorter prefix than the one that he was given.
                self.split(leaf, kept);
            }
            evicted.extend(self.prune(leaf).into_iter().rev());
        }
        evicted
    }

    /// Removes an unlocked leaf and returns its pages.
    fn prune(&mut self, leaf: usize) -> Vec<PageId> {
        self.retract(leaf);
        let node = self.nodes.remove(leaf);
        let parent = node.parent.expect("the root is no candidate");
        self.nodes[parent].children.remove(&node.tokens[..self.page_size]);
        self.num_evictable -= node.pages.len();
        for page in &node.pages {
            self.pages.remove(page);
        }
        self.propose(parent);
        node.pages
    }

    /// Makes `node` a candidate if it is an unlocked leaf.
    pub(super) fn propose(&mut self, node: usize) {
        if self.nodes[node].is_candidate() {
            self.candidates.insert((self.nodes[node].last_access, node));
        }
    }

    /// Takes `node` from the candidates, before anything changes that decides whether and where it is one.
    pub(super) fn retract(&mut self, node: usize) {
        self.candidates.remove(&(self.nodes[node].last_access, node));
    }
}
