// SPDX-License-Identifier: Apache-2.0

import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import java.util.List;

/**
 * A server for the tests that speaks MongoDB's wire protocol and changes one document atomically, as
 * MongoDB does; in memory. Usage: {@code MongoJavaServer PORT}. It ends when its standard input ends,
 * so that it never outlives the tests.
 */
final class MongoJavaServer {
    /** As it comes it says wire version 8, which today's drivers refuse. */
    private static final class Six implements MongoVersion {
        @Override
        public List<Integer> getVersionArray() {
            return List.of(6, 0, 0);
        }

        @Override
        public int getWireVersion() {
            return 17;
        }
    }

    public static void main(String[] arguments) throws Exception {
        MongoServer server = new MongoServer(new MemoryBackend().version(new Six()));
        server.bind("127.0.0.1", Integer.parseInt(arguments[0]));
        while (System.in.read() >= 0) {}
        System.exit(0);
    }
}
