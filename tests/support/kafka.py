# SPDX-License-Identifier: Apache-2.0
"""Three Kafka nodes on this machine, which a test may kill, stop and start again.

The jars come from Maven, once, into ``.cache``. The nodes are started by the first test that needs
them, and serve all tests and all processes of a run. One test has them at a time, so that no test
notices what another one does to them. They end when the last process of the run has ended, however
it ends.

Each node has four listeners: ``plain``, ``secure`` (TLS and SASL), ``proxied`` (the nodes advertise
the ports on which :meth:`Cluster.proxies` listens) and the one of the controllers.

:func:`mock` is a broker without Java, for what needs no durability.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.cache import cached
from support.mongo import free_port
from support.processes import alive
from support.tcp_proxy import TcpProxy
from support.waiting import wait_for

SOURCES: Final = Path(__file__).resolve().parents[1] / "kafka_servers"
HELP: Final = (
    "the Kafka tests need a JRE 17 or newer and Maven (Debian: default-jdk-headless maven)"
)
NODES: Final = (1, 2, 3)
#: The user of the secure listener, for SCRAM-SHA-512 and PLAIN.
USER: Final = "engage"
PASSWORD: Final = "a password for tests"

#: C1 and small heaps: without them three nodes need 20 s and 0.9 GB instead of 6 s and 0.6 GB.
_JAVA: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_LISTENERS: Final = ("plain", "secure", "proxied", "advertised", "controller")

_PROPERTIES: Final = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAIN://127.0.0.1:{plain},SECURE://127.0.0.1:{secure},PROXIED://127.0.0.1:{proxied},\
CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAIN://127.0.0.1:{plain},SECURE://127.0.0.1:{secure},\
PROXIED://127.0.0.1:{advertised}
listener.security.protocol.map=PLAIN:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL
inter.broker.listener.name=PLAIN
controller.listener.names=CONTROLLER
ssl.keystore.type=PEM
ssl.keystore.location={folder}/node.pem
ssl.truststore.type=PEM
ssl.truststore.location={folder}/ca.pem
ssl.client.auth=requested
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512
listener.name.secure.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required \
user_{user}="{password}";
listener.name.secure.scram-sha-512.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
log.dirs={folder}/n{node}
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=3
transaction.state.log.num.partitions=3
transaction.state.log.min.isr=2
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
unclean.leader.election.enable=false
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=500
controller.quorum.fetch.timeout.ms=1000
replica.lag.time.max.ms=5000
log.cleaner.enable=false
log.retention.check.interval.ms=1000
log.segment.delete.delay.ms=1000
"""


#: What a node logs if another process has taken one of its ports.
_TAKEN: Final = "Address already in use"
#: How often other ports are chosen.
_ATTEMPTS: Final = 5


class NoKafkaError(Exception):
    """The nodes cannot be started; the message says what to install, or what the node logged."""


class PortTakenError(NoKafkaError):
    """Another process took a port of a node after it had been chosen."""


# ---------------------------------------------------------------------------------------- building
def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise NoKafkaError(f"{HELP} ({' '.join(command[:2])} failed: {tail[:600]})")


def _program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise NoKafkaError(HELP)
    return program


@functools.cache
def server() -> Path:
    """Return the folder with Kafka's jars and the formatted, empty folders of the nodes.

    Making it takes about 20 s the first time.
    """

    def build(folder: Path) -> None:
        # The version is pinned: the one that Debian's Maven has by default may change.
        goal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
        pom = ["-f", str(SOURCES / "pom.xml")]
        _run(
            [
                *(_program("mvn"), "-q", "-B", *pom, goal),
                *("-DincludeScope=runtime", f"-DoutputDirectory={folder / 'lib'}"),
            ]
        )
        for line in (SOURCES / "jars.txt").read_text().splitlines():
            if line.startswith("#"):
                continue
            digest, name = line.split()
            jar = folder / "lib" / name
            if not jar.exists():
                raise NoKafkaError(f"Maven did not bring {name}")
            if hashlib.sha256(jar.read_bytes()).hexdigest() != digest:
                raise NoKafkaError(f"{name} is not the file that jars.txt names")
        shutil.copy(SOURCES / "log4j2.yaml", folder)
        for node in NODES:
            _format(folder, node)

    ingredients = b"".join(
        (SOURCES / name).read_bytes() for name in ("pom.xml", "jars.txt", "log4j2.yaml")
    )
    return cached("kafka", ingredients + _PROPERTIES.encode(), build)


def _format(folder: Path, node: int) -> None:
    """Make the folder of an empty node, once; each run copies it."""
    path = folder / f"n{node}.properties"
    ports = {n: {name: 10 * n + k for k, name in enumerate(_LISTENERS)} for n in NODES}
    path.write_text(_properties(folder, node, ports))
    scram = f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"
    arguments = ["format", "-t", "ZW5nYWdlLXRlc3Qta2Fma2", "-c", str(path), "--add-scram", scram]
    _run([*_java(folder), "-Xmx128m", "kafka.tools.StorageTool", *arguments])


def _java(folder: Path) -> list[str]:
    log = f"-Dlog4j2.configurationFile={folder / 'log4j2.yaml'}"
    # Java does not look at TMPDIR.
    temporary = f"-Djava.io.tmpdir={tempfile.gettempdir()}"
    return [_program("java"), *_JAVA, temporary, "-cp", f"{folder / 'lib'}/*", log]


def _properties(
    folder: Path, node: int, ports: Mapping[int, Mapping[str, int]], host: str = "127.0.0.1"
) -> str:
    voters = ",".join(f"{n}@127.0.0.1:{ports[n]['controller']}" for n in ports)
    made = _PROPERTIES.format(
        node=node, voters=voters, folder=folder, user=USER, password=PASSWORD, **ports[node]
    )
    if len(ports) == 1:
        made = re.sub(
            r"(?m)^(.*(?:replication\.factor|min\.isr|insync\.replicas))=.$", r"\1=1", made
        )
        topic = "share.coordinator.state.topic"
        made += f"{topic}.replication.factor=1\n{topic}.min.isr=1\n"
    return made.replace("127.0.0.1", host)


# ------------------------------------------------------------------------------------------- nodes
class Cluster:
    """The three nodes, for the test that has them now; see :func:`cluster`.

    :param folder: where they keep their data and their logs.
    :param host: the address on which they listen.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.host = host
        ports = json.loads((folder / "ports.json").read_text())
        self.ports: dict[int, dict[str, int]] = {int(node): ports[node] for node in ports}
        #: Their numbers.
        self.nodes = tuple(self.ports)
        self._admin: AdminClient | None = None

    def servers(self, listener: str = "plain") -> str:
        """Return the addresses of all nodes, separated by commas.

        :param listener: ``plain``, ``secure``, or ``advertised`` for those of the proxies.
        """
        return ",".join(f"{self.host}:{self.ports[node][listener]}" for node in self.nodes)

    @property
    def ca(self) -> Path:
        """The certificate of the authority that signed those of the nodes."""
        return self.folder / "ca.pem"

    @property
    def client_certificate(self) -> Path:
        """A certificate for clients with its key, in one file."""
        return self.folder / "client.pem"

    # --------------------------------------------------------------------------- processes
    def pid(self, node: int) -> int:
        """Return the process id of a node, running or not."""
        return int((self.folder / f"n{node}.pid").read_text())

    def running(self, node: int) -> bool:
        """Return whether the process of a node exists; it may be stopped."""
        return (self.folder / f"n{node}.pid").exists() and alive(self.pid(node))

    def start(self, node: int) -> None:
        """Start a node. :meth:`wait` waits until it works."""
        assert not self.running(node)
        command = [
            *_java(server()),
            *("-Xms160m", "-Xmx160m", "kafka.Kafka"),
            str(self.folder / f"n{node}.properties"),
        ]
        pid = _spawn(command, self.folder / f"n{node}.log")
        (self.folder / f"n{node}.pid").write_text(str(pid))

    def kill(self, *nodes: int) -> None:
        """Kill nodes (SIGKILL) at the same time, and wait for their end."""
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(node), signal.SIGKILL)
        for node in nodes:
            with contextlib.suppress(ChildProcessError):
                # Another process of the run may have started it.
                os.waitpid(self.pid(node), 0)
            while self.running(node):
                time.sleep(0.01)

    def pause(self, node: int) -> None:
        """Stop a node (SIGSTOP): it keeps its connections, and does not answer."""
        os.kill(self.pid(node), signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Let a stopped node continue (SIGCONT)."""
        os.kill(self.pid(node), signal.SIGCONT)

    def wait(self, *, seconds: float = 240) -> None:
        """Wait until all nodes work, and all replicas of all topics are in sync."""
        deadline = time.monotonic() + seconds
        for node in self.nodes:
            # Another node's answer may be from before this one was killed. A node answers when the
            # controller has accepted it again.
            while not self._works(self._client_of(node)):
                if not self.running(node):
                    log = (self.folder / f"n{node}.log").read_text()
                    kind = PortTakenError if _TAKEN in log else NoKafkaError
                    raise kind(f"node {node} has ended: {log[-800:]}")
                if time.monotonic() > deadline:
                    raise NoKafkaError(f"node {node} does not work after {seconds:.0f} s")
                time.sleep(0.05)

    def _client_of(self, node: int) -> AdminClient:
        """Return a client whose first request goes to this node."""
        address = f"{self.host}:{self.ports[node]['plain']}"
        return AdminClient({"bootstrap.servers": address, "log_level": 0})

    def _works(self, admin: AdminClient) -> bool:
        try:
            found = admin.list_topics(timeout=2)
        except KafkaException:
            return False
        partitions = [p for topic in found.topics.values() for p in topic.partitions.values()]
        return len(found.brokers) == len(self.nodes) and all(
            p.leader > 0 and len(p.isrs) == len(p.replicas) for p in partitions
        )

    def heal(self) -> None:
        """Start and continue every node, and delete all topics."""
        for node in self.nodes:
            if self.running(node):
                self.resume(node)
            else:
                self.start(node)
        self.wait()
        topics = [name for name in self.admin.list_topics(timeout=60).topics if name[0] != "_"]
        if topics:
            for deleted in self.admin.delete_topics(topics, operation_timeout=60).values():
                deleted.result()
        self._admin = None

    # ------------------------------------------------------------------------------ topics
    @property
    def admin(self) -> AdminClient:
        """A client for administration."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.servers(), "log_level": 0})
        return self._admin

    def make_topic(
        self,
        name: str,
        *,
        partitions: int = 6,
        replicas: int = 3,
        config: Mapping[str, str] | None = None,
    ) -> str:
        """Create a topic with the settings that engage wants, changed by ``config``.

        :return: its name.
        """
        wanted = {
            "min.insync.replicas": "2",
            "message.timestamp.type": "LogAppendTime",
            "retention.ms": "604800000",
            **(config or {}),
        }
        made = NewTopic(name, partitions, replicas, config=wanted)
        self.admin.create_topics([made], operation_timeout=60)[name].result()
        # Each node has its own list of topics.
        for client in map(self._client_of, filter(self.running, self.nodes)):
            while name not in client.list_topics(timeout=60).topics:
                time.sleep(0.05)
        return name

    def settings(self, topic: str) -> dict[str, str]:
        """Return all settings of a topic."""
        resource = ConfigResource(ResourceType.TOPIC, topic)
        found = self.admin.describe_configs([resource])[resource].result()
        return {name: str(entry.value) for name, entry in found.items()}

    def set(self, topic: str, name: str, value: str) -> None:
        """Change one setting of a topic, and wait until the nodes answer with it."""
        change = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
        self.admin.incremental_alter_configs([resource])[resource].result()
        wait_for(lambda: self.settings(topic)[name] == value, what=f"{name}={value}")
        time.sleep(0.2)  # every node has its own copy of the settings

    def leaders(self, topic: str) -> dict[int, int]:
        """Return partition → the node that leads it."""
        found = self.admin.list_topics(topic, timeout=60).topics[topic].partitions
        return {number: partition.leader for number, partition in found.items()}

    def delete_records(self, topic: str, before: Mapping[int, int]) -> None:
        """Delete the records of partitions before an offset, as the retention does."""
        places = [TopicPartition(topic, number, offset) for number, offset in before.items()]
        for deleted in self.admin.delete_records(places).values():
            deleted.result()

    def records(self, topic: str, *, listener: str = "plain") -> list[Any]:
        """Return all records of a topic, in the order of each partition, with another client."""
        return read_all(self.servers(listener), topic)

    # ------------------------------------------------------------------------------- faults
    @contextlib.contextmanager
    def proxies(self) -> Iterator[dict[int, TcpProxy]]:
        """Run a proxy in front of each node, for clients of ``servers("advertised")``."""
        with contextlib.ExitStack() as stack:
            yield {
                node: stack.enter_context(
                    TcpProxy(
                        ("127.0.0.1", self.ports[node]["proxied"]),
                        port=self.ports[node]["advertised"],
                    )
                )
                for node in self.nodes
            }


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Have the three nodes; they are started if they do not run, and are repaired afterwards.

    It waits while a test of another process has them.
    """
    folder = _shared_folder()
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        nodes = folder / "nodes"
        if not (nodes / "ready").exists():
            _start_all(nodes)
        found = Cluster(nodes)
        if not all(map(found.running, NODES)):
            found.heal()
        try:
            yield found
        finally:
            found.heal()


@contextlib.contextmanager
def own(host: str = "127.0.0.1", nodes: Sequence[int] = NODES) -> Iterator[Cluster]:
    """Start other nodes, for one test or a benchmark.

    :param host: an address of this machine.
    :param nodes: three of them, or one.
    """
    folder = _shared_folder() / f"own-{os.getpid()}"
    _start_all(folder, host, nodes)
    made = Cluster(folder, host)
    try:
        yield made
    finally:
        made.kill(*filter(made.running, made.nodes))
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _shared_folder() -> Path:
    """Return the folder of the run, and keep the nodes running until this process ends."""
    name = hashlib.sha256(f"{SOURCES} {os.getuid()}".encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"engage-kafka-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # The kernel releases the lock when this process ends, in whichever way. The janitor waits for
    # the exclusive lock: it gets it when no process has the shared one.
    users = os.open(folder / "users", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(users, fcntl.LOCK_SH)
    janitor = [sys.executable, "-c", _JANITOR, str(folder)]
    _spawn(janitor, Path(os.devnull))
    return folder


def _spawn(command: list[str], log: Path) -> int:
    """Start a process that outlives this one, in a session of its own: Ctrl-C is for pytest.

    :return: its id.
    """
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        command[0],
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, write, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


_JANITOR: Final = """
import fcntl, os, pathlib, shutil, signal, sys
folder = pathlib.Path(sys.argv[1])
with open(folder / "users") as users:
    fcntl.flock(users, fcntl.LOCK_EX)
    for path in folder.glob("*/n?.pid"):
        pid = int(path.read_text())
        try:
            if b"kafka.Kafka" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass
    for nodes in folder.glob("*/"):
        shutil.rmtree(nodes, ignore_errors=True)
"""


def _start_all(folder: Path, host: str = "127.0.0.1", nodes: Sequence[int] = NODES) -> None:
    """Start nodes that have no data yet, on ports that are free."""
    for attempt in range(_ATTEMPTS):
        try:
            _try_to_start(folder, host, nodes)
        except PortTakenError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def _try_to_start(folder: Path, host: str, nodes: Sequence[int]) -> None:
    made = server()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    ports = {node: {name: free_port() for name in _LISTENERS} for node in nodes}
    (folder / "ports.json").write_text(json.dumps(ports))
    certificates(folder)
    for node in nodes:
        shutil.copytree(made / f"n{node}", folder / f"n{node}")
        (folder / f"n{node}.properties").write_text(_properties(folder, node, ports, host))
    found = Cluster(folder, host)
    for node in nodes:
        found.start(node)
    try:
        found.wait()
    except BaseException:
        found.kill(*nodes)
        raise
    (folder / "ready").touch()


def certificates(folder: Path) -> None:
    """Write ``ca.pem``, and ``node.pem`` and ``client.pem`` with key and certificate."""
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engage tests")])

    def sign(name: str, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = (
            x509.CertificateBuilder()
            .subject_name(issuer if ca else subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(authority, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    ca = sign("engage tests", authority, ca=True)
    (folder / "ca.pem").write_bytes(ca)
    for name in ("node", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / f"{name}.pem").write_bytes(private + sign(name, key, ca=False) + ca)


# -------------------------------------------------------------------------------- without a server
@contextlib.contextmanager
def mock(nodes: int = 3) -> Iterator[str]:
    """Run librdkafka's mock brokers in this process, and return their addresses.

    They make a topic of four partitions when a client names one that they do not know, and do not
    have settings of topics.
    """
    owner = Producer(
        {"test.mock.num.brokers": nodes, "bootstrap.servers": "replaced", "log_level": 0}
    )
    brokers = owner.list_topics(timeout=60).brokers.values()
    yield ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    del owner


# -------------------------------------------------------------------------- an independent reader
def read_all(servers: str, topic: str, **options: Any) -> list[Any]:
    """Return all records of a topic with librdkafka, in the order of each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": f"reader-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            "isolation.level": "read_committed",
            "log_level": 0,
            **options,
        }
    )
    try:
        numbers = consumer.list_topics(topic, timeout=60).topics[topic].partitions
        left: dict[int, int] = {}
        for number in numbers:
            first, end = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=60)
            if end > first:
                left[number] = end
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in left])
        found = []
        deadline = time.monotonic() + 60
        while left:
            for message in consumer.consume(1000, 0.5):
                if message.error():
                    raise KafkaException(message.error())
                found.append(message)
                number, offset = message.partition(), message.offset()
                assert number is not None
                assert offset is not None
                if offset + 1 >= left.get(number, 0):
                    left.pop(number, None)
            assert time.monotonic() < deadline, f"records are missing: {left}"
    finally:
        consumer.close()
    return sorted(found, key=lambda message: (message.partition(), message.offset()))
