//! Locks: how a running request keeps the prefix that it uses.
//!
//! Invariant: a node's path locks are its own locks plus the path locks of its children, so an unlocked node
//! has nothing locked below it and eviction from the leaves upwards never meets a lock.

use tilewright::{Error, Result, ensure};

use super::{RadixTree, node::NodeId};

impl RadixTree {
    /// Keeps `node` and all above it from eviction until [`unlock`](Self::unlock). Locks add up.
    ///
    /// # Errors
    /// When the node is no longer in the tree.
    pub fn lock(&mut self, node: NodeId) -> Result<()> {
        let index = self.find("radix.lock", node)?;
        self.retract(index);
        self.nodes[index].own_locks += 1;
        let mut at = Some(index);
        while let Some(index) = at {
            let node = &mut self.nodes[index];
            if node.path_locks == 0 {
                self.num_evictable -= node.pages.len();
            }
            node.path_locks += 1;
            at = node.parent;
        }
        Ok(())
    }

    /// Takes back one [`lock`](Self::lock) of this very node. The access time stays as it is.
    ///
    /// # Errors
    /// When the node is no longer in the tree or has no lock of its own; then nothing was changed.
    pub fn unlock(&mut self, node: NodeId) -> Result<()> {
        let index = self.find("radix.unlock", node)?;
        ensure!(self.nodes[index].own_locks > 0, "radix.unlock", "{node} is not locked");
        self.nodes[index].own_locks -= 1;
        let mut at = Some(index);
        while let Some(index) = at {
            let node = &mut self.nodes[index];
            node.path_locks -= 1;
            if node.path_locks == 0 {
                self.num_evictable += node.pages.len();
            }
            at = node.parent;
        }
        self.propose(index);
        Ok(())
    }

    /// The slot of a node that a caller names.
    fn find(&self, operator: &'static str, node: NodeId) -> Result<usize> {
        let missing = || Error::new(operator, format!("{node} is not, or no longer, in the tree"));
        self.nodes.find(node).ok_or_else(missing)
    }
}
